"""Reads the GPUs, in a process of its own: a driver that does not answer blocks whoever asks it.

``nvml`` and ``gpu_health`` start this file by its path and read its lines of output, each a JSON object. What can be
asked: ``activity``, one line about what NVIDIA's GPUs do; ``watch``, lines about their health, and events, until stdin
ends; ``amd:ROOT``, the same for AMD's GPUs, by the files below ROOT.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplaunch.system import signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.system.gpus.gpu_history import History
    from ddplaunch.system.gpus.nvml_values import Events

_READINGS_PER_MINUTE = 12
_NOISE = ("used_bytes", "pids", "clock_reasons", "temperature_margin_c", "nvlink_errors")
"""What also changes in a GPU to which nothing has happened."""


def main() -> None:
    """``sys.argv``: what to read, seconds between readings, and the ``sys.path`` of the starting process."""
    what, interval_s, sys.path[:] = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    # The parent may find this package by other means than its path.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    try:
        if what == "activity":
            from ddplaunch.system.gpus import nvml_values

            _say(gpus=nvml_values.activity(_binding()))
        else:
            source = _amd(what.removeprefix("amd:")) if what.startswith("amd:") else _nvidia()
            _Watch(source, interval_s).run()
    except Exception as error:  # ctypes and the binding raise errors of many kinds; the reader gets them all.
        _say(error=_text(error))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _say(**answer: Any) -> None:
    """One line, whichever thread calls."""
    with _output:
        print(json.dumps(answer), flush=True)


_output = threading.Lock()


class _Source(NamedTuple):
    """Where readings and events come from."""

    health: Callable[[], list[dict[str, Any]]]
    memory: Callable[[], list[dict[str, Any]]]
    usage: Callable[[], list[dict[str, Any]]]
    events: Callable[[], Events] | None = None
    root: str = "/"


def _binding() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _nvidia() -> _Source:
    from ddplaunch.system.gpus import nvml_values as values

    nvml = _binding()
    health, memory, usage = (functools.partial(read, nvml) for read in (values.health, values.memory, values.usage))
    return _Source(health, memory, usage, lambda: values.Events(nvml))


def _amd(root: str) -> _Source:
    from ddplaunch.system.gpus import amd_gpus

    health, memory, usage = (
        functools.partial(read, root) for read in (amd_gpus.health, amd_gpus.memory, amd_gpus.usage)
    )
    return _Source(health, memory, usage, root=root)


class _Watch:
    """Readings, answers and events until stdin ends. NVML is called in threads: the main one must see that end."""

    def __init__(self, source: _Source, interval_s: float) -> None:
        self._source = source
        self._interval_s = interval_s
        self._questions: queue.Queue[str] = queue.Queue()
        self._said: Any = None
        self._histories: dict[int, History] = {}

    def run(self) -> None:
        signals.leave_to_agent()  # It closes stdin at its end.
        threading.Thread(target=self._answer, daemon=True).start()
        for line in sys.stdin:
            self._questions.put(line.strip())
        os._exit(0)  # A thread that the driver blocks would keep the interpreter.

    def _answer(self) -> None:
        self._ask("health")
        if self._source.events:
            threading.Thread(target=self._tell_events, args=(self._source.events,), daemon=True).start()
        due = time.monotonic() + self._interval_s
        while True:
            try:
                question = self._questions.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                question, due = "", time.monotonic() + self._interval_s
            self._ask(question)

    def _ask(self, question: str) -> None:
        try:
            if question == "memory":
                _say(memory=self._source.memory())
            elif question == "usage":
                _say(usage=self._usage())
            else:
                self._read(is_wanted=question == "health")
        except Exception as error:  # As in main().
            _say(error=_text(error))

    def _usage(self) -> list[dict[str, Any]]:
        """Nothing if it cannot be read: the next reading of the health tells why."""
        try:
            return self._source.usage()
        except Exception:  # As in main().
            return []

    def _read(self, is_wanted: bool) -> None:
        """Says what the GPUs are like if that is wanted or has changed, else only that NVML has answered."""
        gpus = self._source.health()
        for gpu in gpus:
            self._history(gpu["index"]).add_to(gpu)
        comparable = [{**gpu, **dict.fromkeys(_NOISE)} for gpu in gpus]
        ports = self._ports()
        is_news = is_wanted or (comparable, ports) != self._said
        _say(**{"gpus": gpus, "ports": ports} if is_news else {})
        self._said = comparable, ports

    def _ports(self) -> list[dict[str, Any]]:
        from ddplaunch.system import infiniband

        return [vars(port) for port in infiniband.ports(self._source.root)]

    def _history(self, index: int) -> History:
        from ddplaunch.system.gpus.gpu_history import History

        return self._histories.setdefault(index, History(self._interval_s * _READINGS_PER_MINUTE))

    def _tell_events(self, open_events: Callable[[], Events]) -> None:
        """Says each event, and reads the GPUs after it. Ends where the driver has no events."""
        try:
            events = open_events()
        except Exception:  # The binding's.
            return
        while events:
            event = events.wait()
            if event:
                _say(events=[event])
            self._questions.put("")


if __name__ == "__main__":
    main()
