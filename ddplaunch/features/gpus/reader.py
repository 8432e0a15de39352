"""Reads this machine's GPUs: a child process does it, waits for the driver's events and answers questions.

The driver of a sick GPU blocks whoever calls it, so only the child does (``child``). The child ends
when its stdin is closed: by the agent, or because the agent ends. What it says is checked as every record is.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch.features.gpus.records import GpuEvent, GpusRead, Question
from ddplaunch.protocol import wire
from ddplaunch.system import devices
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    Answer = GpusRead | GpuEvent

INTERVAL_S = 5.0
"""Between two readings of all GPUs, which take some milliseconds for each."""

SILENCE_S = 15.0
"""A reading is this late before it is said that NVML does not answer: its calls wait for one another under load."""

_CHILD_STARTS_S = 15.0
"""For so long the child may take to start: on a loaded machine that says nothing about the driver."""

UNREADABLE = "the answer of the GPU driver could not be read"
_ENDED = "the process that asks the GPU driver has ended"
_CHILD = str(Path(__file__).with_name("child.py"))
_MAX_ANSWER_BYTES = 1 << 20
_REAP_S = 0.2


class GpuReader:
    """The child process, and the thread that reads its answers.

    The methods may be called from any thread, and neither block nor raise.
    """

    def __init__(self, what: str, on_answer: Callable[[Answer], None], interval_s: float) -> None:
        """Use ``start``. Raises OSError if the child cannot be started; ``what`` is its first argument."""
        # -S and -I: the child takes this process's search path, which has no folder of the user first.
        command = [sys.executable, "-S", "-I", _CHILD, what, str(interval_s), *sys.path]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._who = "NVML" if what == "nvml" else "amdgpu"
        self._on_answer, self._interval_s = on_answer, interval_s
        self._missing = ""
        self._expect(_CHILD_STARTS_S, f"the process that asks {self._who} has not started for {_CHILD_STARTS_S:g} s")
        in_thread("gpu reader", self._read)

    @classmethod
    def start(
        cls, on_answer: Callable[[Answer], None], interval_s: float = INTERVAL_S, root: str = "/"
    ) -> GpuReader | None:
        """None on a machine without GPUs of NVIDIA or AMD; or if no child could be started, after an answer about that.

        Args:
            on_answer: is called with each answer, in a thread of the reader; until after ``close``, for one answer.
            interval_s: seconds between readings of the health, which an answer follows if something has changed.
            root: where AMD's driver has its files.
        """
        if not devices.has_nvml() and not devices.is_amd(root):
            return None
        try:
            return cls("nvml" if devices.has_nvml() else root, on_answer, interval_s)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            on_answer(GpusRead(missing=f"no process could be started to ask the GPU driver: {reason}"))
            return None

    def ask(self, question: Question) -> None:
        """A GpusRead follows; not while the driver blocks, so that the caller waits with a bound.

        After a first question about the health, events and changes follow unasked, and a word if the driver is silent.
        """
        try:
            self._stdin.write(f"{question}\n".encode())
            self._stdin.flush()
        except (OSError, ValueError):  # It has ended, or was closed.
            self._on_answer(GpusRead(question=question, missing=self._missing or _ENDED))

    @property
    def pid(self) -> int:
        """The child process."""
        return self._process.pid

    def close(self) -> None:
        """Ends the child. Also safe a second time."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe
        is_silent = False
        try:
            for line in _lines(pipe.fileno(), lambda: self._limit_s):
                if line == b"":  # The child's first word: it runs, and calls the driver next.
                    self._expect(devices.NVML_LIMIT_S, _silence(devices.NVML_LIMIT_S, self._who))
                    continue
                if line is None and not is_silent:
                    self._tell(GpusRead(missing=self._if_silent))
                elif line is not None:
                    self._tell(_decoded(line))
                if line is not None and is_silent:
                    self.ask("health")  # It answers again, but what it says may not have changed.
                is_silent = line is None
        finally:
            self._end()

    def _expect(self, limit_s: float, if_silent: str) -> None:
        """A line is to follow within ``limit_s``; if none does, ``if_silent`` is told."""
        self._limit_s, self._if_silent = limit_s, if_silent

    def _tell(self, answer: Answer) -> None:
        self._expect(self._interval_s + SILENCE_S, _silence(SILENCE_S, self._who))
        if isinstance(answer, GpusRead) and answer.question == "health":
            self._missing = answer.missing
        if not isinstance(answer, GpusRead) or answer.question:
            self._on_answer(answer)

    def _end(self) -> None:
        """Does not wait for a process that the driver holds: ``subprocess`` reaps it later."""
        is_expected = self._stdin.closed or self._missing
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        if self._process.stdout:
            self._process.stdout.close()
        if not is_expected:
            self._tell(GpusRead(missing=f"the process that asked {self._who} ended with {self._process.returncode}"))
        self.close()


def read_once(question: Question, limit_s: float) -> GpusRead:
    """All GPUs, or none and why not; empty on a machine without any. Blocks up to ``limit_s``; raises nothing."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    reader = GpuReader.start(answers.put)
    if reader is None:
        return GpusRead() if answers.empty() else next(_reads(answers, 0))
    reader.ask(question)
    with contextlib.closing(reader):
        for read in _reads(answers, time.monotonic() + limit_s):
            if read.missing or read.question == question:
                return read
    return GpusRead(missing=_silence(limit_s, "NVML"))


def _reads(answers: queue.SimpleQueue[Answer], deadline: float) -> Iterator[GpusRead]:
    """The answers that arrive before the deadline, without events."""
    with contextlib.suppress(queue.Empty):
        while True:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(answer, GpusRead):
                yield answer


def _silence(duration_s: float, who: str) -> str:
    return f"{who} has not answered for {duration_s:g} s: the GPU driver hangs, or is very slow"


def _lines(fd: int, limit_s: Callable[[], float]) -> Iterator[bytes | None]:
    """Lines until the end of the pipe; None whenever ``limit_s()`` seconds have passed without one."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    rest = b""
    due = time.monotonic() + limit_s()
    while len(rest) < _MAX_ANSWER_BYTES:
        if not poll.poll(max(0.0, due - time.monotonic()) * 1000):
            yield None
            due = time.monotonic() + limit_s()
            continue
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if lines:
            due = time.monotonic() + limit_s()


def _decoded(line: bytes) -> Answer:
    try:
        answer: Answer = wire.decode(line, (GpusRead, GpuEvent))
    except wire.ProtocolError:
        return GpusRead(missing=UNREADABLE)
    return answer
