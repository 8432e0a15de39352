"""Watches of GPUs for tests: a real child process, over the fake library of the driver."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import TypeVar

from ddplaunch.system.gpus.gpu_health import Answer, GpusRead, GpuWatch

T = TypeVar("T")


class Watched:
    """A watch, and what it has answered."""

    def __init__(self, interval_s: float, root: str = "/") -> None:
        self._answers: queue.Queue[Answer] = queue.Queue()
        watch = GpuWatch.start(self._answers.put, interval_s, root)
        assert watch
        self.watch = watch

    def next(self, kind: type[T]) -> T:
        answer = self._answers.get(timeout=20)
        assert isinstance(answer, kind), answer
        return answer

    def until(self, is_it: Callable[[Answer], bool]) -> Answer:
        """The next answer of which ``is_it`` is true; others are passed over."""
        while not is_it(answer := self._answers.get(timeout=20)):
            pass
        return answer

    def until_read(self, is_it: Callable[..., bool]) -> GpusRead:
        """The next reading whose first GPU is as ``is_it`` wants it."""
        answer = self.until(lambda answer: isinstance(answer, GpusRead) and bool(answer.gpus) and is_it(answer.gpus[0]))
        assert isinstance(answer, GpusRead)
        return answer


@contextlib.contextmanager
def watches() -> Iterator[Callable[..., Watched]]:
    """Starts watches, with the arguments of ``Watched``, and ends them."""
    with contextlib.ExitStack() as started:

        def start(interval_s: float = 60, root: str = "/") -> Watched:
            watched = Watched(interval_s, root)
            started.callback(watched.watch.close)
            return watched

        yield start
