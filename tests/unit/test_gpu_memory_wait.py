"""The wait for free GPU memory ends when it is free, when its time is over, or when nobody answers; time is made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ddplaunch.features.health import gpu_memory_wait
from ddplaunch.features.health.gpu_memory_wait import await_free_memory
from ddplaunch.protocol.gpus import GpuReading
from ddplaunch.protocol.launcher_agent import Notice

MB = 1 << 20
BEFORE = 1000 * MB


class Node:
    """A node with one GPU, of which ``used`` says how much is in use at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: Callable[[float], int | None]) -> None:
        self.now, self.sent, self.is_stopping = 0.0, list[Notice](), False
        self._used = used
        self.gpus = SimpleNamespace(used_at_start={0: BEFORE}, memory=None, ask_memory=self._ask_memory)
        monkeypatch.setattr(gpu_memory_wait.time, "monotonic", lambda: self.now)

    def _ask_memory(self) -> None:
        used = self._used(self.now)
        gpus = (GpuReading(index=0, used_bytes=used, pids=(1 << 22,)),)
        self.gpus.memory = None if used is None else gpus

    def _wait(self, done: Callable[[], bool], deadline: float) -> bool:
        if not done():
            self.now = deadline
        return done()

    def wait(self) -> float:
        """Seconds until the next attempt may start."""
        await_free_memory(self.gpus, "gpu3", self._wait, lambda: self.is_stopping, self.sent.append)  # type: ignore[arg-type]
        return self.now


@pytest.mark.parametrize("used", [0, BEFORE, BEFORE + 512 * MB])
def test_memory_of_others_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, used: int) -> None:
    node = Node(monkeypatch, lambda _: used)
    assert (node.wait(), node.sent) == (0.0, [])


def test_the_start_follows_as_soon_as_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, lambda now: BEFORE + 513 * MB if now < 2.1 else BEFORE)
    assert 2.1 <= node.wait() <= 2.5
    assert not node.sent, "a short wait is not worth a line"


def test_after_its_limit_it_says_who_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, lambda _: 40 << 30)
    assert 50.0 <= node.wait() <= 50.5
    waits, ends = node.sent
    in_use = f"40 GB of GPU 0 (held by pid {1 << 22}) on gpu3 is still in use"
    assert waits == Notice(f"{in_use}; the workers start when it is free")
    assert ends == Notice(f"after 50 s {in_use}; the workers start all the same", -1)


def test_a_driver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Node(monkeypatch, lambda _: None).wait() <= 2.0


def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, lambda _: 40 << 30)
    node.is_stopping = True
    assert node.wait() <= 2.0
