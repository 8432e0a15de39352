"""Readers of GPUs for tests: a real child process, over the fake library of the driver."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator

from ddplaunch.features.gpus.reader import GpuReader
from ddplaunch.features.gpus.records import GpuEvent, GpuReading, GpusRead, Question


def changed(gpu: GpuReading) -> str:
    """What is known of it."""
    usual = vars(GpuReading(index=0))
    return " ".join(f"{name}={value!r}" for name, value in vars(gpu).items() if value != usual[name] or name == "index")


class Watched:
    """A reader, and what it has answered."""

    def __init__(self, interval_s: float, root: str = "/") -> None:
        self._answers: queue.Queue[GpusRead | GpuEvent] = queue.Queue()
        reader = GpuReader.start(self._answers.put, interval_s, root)
        assert reader
        self.reader = reader
        self.reader.ask("health")

    def event(self) -> GpuEvent:
        """The next answer, which is an event."""
        answer = self._answers.get(timeout=20)
        assert isinstance(answer, GpuEvent), answer
        return answer

    def read(self, question: Question = "health") -> GpusRead:
        """The next answer, which is a reading; of something else than the health if that is asked for."""
        if question != "health":
            self.reader.ask(question)
        answer = self._answers.get(timeout=20)
        assert isinstance(answer, GpusRead), answer
        assert answer.question == question, answer
        return answer

    def until_read(self, is_it: Callable[..., bool]) -> GpusRead:
        """The next reading whose first GPU is as ``is_it`` wants it; other answers are passed over."""
        while True:
            answer = self._answers.get(timeout=20)
            if isinstance(answer, GpusRead) and answer.gpus and is_it(answer.gpus[0]):
                return answer


@contextlib.contextmanager
def readers() -> Iterator[Callable[..., Watched]]:
    """Starts readers, with the arguments of ``Watched``, and ends them."""
    with contextlib.ExitStack() as started:

        def start(interval_s: float = 60, root: str = "/") -> Watched:
            watched = Watched(interval_s, root)
            started.callback(watched.reader.close)
            return watched

        yield start
