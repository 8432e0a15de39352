"""Reads the GPUs and network ports, in a process of its own: a driver that does not answer blocks whoever asks it.

``reader`` starts this file by its path, writes questions to its stdin, one a line, and reads records
of ``records`` from its stdout. After a first question about the health, it also tells of events, and of changes.
The driver is called in threads only: the main one must see the end of stdin, which ends this process.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddplaunch.features.gpus.nvml import Events

_READINGS_PER_MINUTE = 12
_THROTTLED_MINUTES, _NVLINK_MINUTES = 10, 30
_NOISE = ("used_bytes", "pids", "clock_reasons", "temperature_margin_c")
"""What also changes in a GPU to which nothing has happened."""


def main() -> None:
    """``sys.argv``: ``nvml``, or the root of the files of AMD's driver; seconds between readings; ``sys.path``."""
    what, interval_s, sys.path[:] = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    # The parent may find this package by other means than its path.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
    from ddplaunch.system import signals

    signals.leave_to_agent()  # It closes stdin at its end.
    questions: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_answer, args=(what, interval_s, questions), daemon=True).start()
    for line in sys.stdin:
        questions.put(line.strip())
    os._exit(0)  # A thread that the driver blocks would keep the interpreter.


def _answer(what: str, interval_s: float, questions: queue.Queue[str]) -> None:
    who = "NVML" if what == "nvml" else "amdgpu"
    try:
        reader = _Reader(what, who, interval_s, questions)
    except Exception as error:  # ctypes and the binding raise errors of many kinds; the reader gets them all.
        _say("GpusRead", missing=f"{who}: {_text(error)}")
        os._exit(0)
    reader.run()


def _text(error: Exception) -> str:
    from ddplaunch.text import quote

    return quote(str(error) or type(error).__name__)


def _say(record: str, **values: Any) -> None:
    """One line, whichever thread calls."""
    with _output:
        print(json.dumps({"record": record, **values}), flush=True)


_output = threading.Lock()


def _told(values: dict[str, Any]) -> dict[str, Any]:
    """The values that a record may have: texts of one line, numbers that make sense; None is left out."""
    from ddplaunch.text import quote

    texts = {name: v.decode(errors="replace") if isinstance(v, bytes) else v for name, v in values.items()}
    return {
        name: quote(value) if isinstance(value, str) else value
        for name, value in texts.items()
        if value is not None and _makes_sense(name, value)
    }


def _makes_sense(name: str, value: Any) -> bool:
    from ddplaunch.features.gpus.records import MAX_NUMBER

    least = -MAX_NUMBER if name == "temperature_margin_c" else 0
    return not isinstance(value, (int, float)) or least <= value <= MAX_NUMBER


def _say_that_it_runs() -> None:
    """After all imports, which take long on a loaded machine: from here on, it is the driver that does not answer."""
    print(flush=True)


class _Reader:
    """Answers questions, reads the health again and again, and tells of events."""

    def __init__(self, what: str, who: str, interval_s: float, questions: queue.Queue[str]) -> None:
        """``what`` as in ``sys.argv``; may raise any error of the driver's binding."""
        self._who, self._interval_s, self._questions = who, interval_s, questions
        self._root = "/" if what == "nvml" else what
        self._read: Callable[[str], list[dict[str, Any]]]
        self._open_events: Callable[[], Events] | None = None
        if what == "nvml":
            self._use_nvml()
        else:
            from ddplaunch.features.gpus import amd

            _say_that_it_runs()
            self._read = functools.partial(amd.read, what)
        self._said: Any = None
        self._histories: dict[int, _History] = {}

    def _use_nvml(self) -> None:
        import pynvml

        from ddplaunch.features.gpus import nvml

        _say_that_it_runs()
        pynvml.nvmlInit()
        self._read, self._open_events = functools.partial(nvml.read, pynvml), lambda: nvml.Events(pynvml)

    def run(self) -> None:
        first = self._questions.get()
        self._ask(first)
        if first == "health" and self._open_events:
            threading.Thread(target=self._tell_events, args=(self._open_events,), daemon=True).start()
        due = time.monotonic() + self._interval_s
        while True:
            try:
                question = self._questions.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                question, due = "", time.monotonic() + self._interval_s
            self._ask(question)

    def _ask(self, question: str) -> None:
        try:
            if question in ("health", ""):
                self._tell_health(is_wanted=bool(question))
            else:
                _say("GpusRead", question=question, gpus=list(map(_told, self._read(question))))
        except Exception as error:  # As in _answer().
            _say("GpusRead", question=question or "health", missing=f"{self._who}: {_text(error)}")

    def _tell_health(self, is_wanted: bool) -> None:
        """Says what the GPUs are like if that is wanted or has changed, else only that the driver has answered."""
        gpus = list(map(_told, self._read("health")))
        for gpu in gpus:
            self._history(gpu["index"]).add_to(gpu)
        _add_usual_links(gpus)
        ports = list(map(_told, ports_of(self._root)))
        comparable = [{**gpu, **dict.fromkeys(_NOISE)} for gpu in gpus], ports
        if is_wanted or comparable != self._said:
            _say("GpusRead", gpus=gpus, ports=ports, missing="" if gpus else f"{self._who} knows no GPU")
        else:
            _say("GpusRead", question="")
        self._said = comparable

    def _history(self, index: int) -> _History:
        return self._histories.setdefault(index, _History(self._interval_s * _READINGS_PER_MINUTE))

    def _tell_events(self, open_events: Callable[[], Events]) -> None:
        """Says each event, and reads the GPUs after it. Ends where the driver has no events."""
        try:
            events = open_events()
        except Exception:  # The binding's.
            return
        while events:
            event = events.wait()
            if event:
                _say("GpuEvent", **_told(event))
            self._questions.put("")


def _add_usual_links(gpus: list[dict[str, Any]]) -> None:
    most: dict[str, int] = {}
    for gpu in gpus:
        name = gpu.get("name", "")
        most[name] = max(most.get(name, 0), gpu.get("nvlinks_active", 0))
    for gpu in gpus:
        if "nvlinks_active" in gpu:
            gpu["nvlinks_usual"] = most[gpu.get("name", "")]


class _Minutes:
    """In how many of the last minutes something was bad."""

    def __init__(self, count: int, minute_s: float) -> None:
        self._count, self._minute_s = count, minute_s
        self._bad: deque[float] = deque()

    def add(self, is_bad: bool) -> int:
        minute = time.monotonic() // self._minute_s
        if is_bad and minute not in self._bad:
            self._bad.append(minute)
        while self._bad and self._bad[0] <= minute - self._count:
            self._bad.popleft()
        return len(self._bad)


class _History:
    """The last minutes of one GPU."""

    def __init__(self, minute_s: float) -> None:
        self._throttled = _Minutes(_THROTTLED_MINUTES, minute_s)
        self._link_errors = _Minutes(_NVLINK_MINUTES, minute_s)
        self._errors: int | None = None

    def add_to(self, gpu: dict[str, Any]) -> None:
        """Adds what the minutes say to a reading, which is one of them."""
        from ddplaunch.features.gpus.records import HARDWARE_SLOWDOWN

        gpu["throttled_minutes"] = self._throttled.add(bool(gpu.get("clock_reasons", 0) & HARDWARE_SLOWDOWN))
        errors = gpu.pop("nvlink_errors", None)
        has_more = errors is not None and self._errors is not None and errors > self._errors
        gpu["nvlink_error_minutes"] = self._link_errors.add(has_more)
        self._errors = errors


# The ports of InfiniBand and RoCE adapters, from the kernel's files, for which the driver asks the adapter.


def ports_of(root: str) -> list[dict[str, Any]]:
    """The values of ``records.IbPort`` of all ports of this machine, by name."""
    return [_port(folder) for folder in sorted(Path(root, "sys/class/infiniband").glob("*/ports/*"))]


def _port(folder: Path) -> dict[str, Any]:
    device = folder.parent.parent
    return dict(
        name=f"{device.name}:{folder.name}",
        board=_content(device / "board_id"),
        link_layer=_content(folder / "link_layer"),
        state=_content(folder / "state").rpartition(": ")[2],
        phys_state=_content(folder / "phys_state").rpartition(": ")[2],
        rate_gbps=_number(folder / "rate"),
        link_downed=_number(folder / "counters/link_downed"),
    )


def _number(file: Path) -> int:
    """The whole number at the begin of a file, as that of ``200 Gb/sec (4X HDR)``."""
    found = re.match(r"[0-9]{1,18}", _content(file), re.ASCII)
    return int(found[0]) if found else 0


def _content(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
