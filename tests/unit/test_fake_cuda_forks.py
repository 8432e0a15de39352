"""A fork of a dry run's worker waits until gloo's threads rest."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.processes import wait_until

Start = Callable[[str], None]


@pytest.fixture
def start_computing() -> Iterator[Start]:
    """Starts a thread that computes without the GIL; the argument is its name for the kernel."""
    is_over, threads = threading.Event(), []

    def compute(name: str) -> None:
        (task(threading.current_thread()) / "comm").write_text(name)
        while not is_over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)

    def start(name: str) -> None:
        threads.append(threading.Thread(target=compute, args=(name,)))
        threads[-1].start()

    yield start
    is_over.set()
    for thread in threads:
        thread.join(10)
        # Python is done with it before the kernel is, and the next test counts what the kernel shows.
        wait_until(lambda thread=thread: not task(thread).exists())


def task(thread: threading.Thread) -> Path:
    return Path(f"/proc/self/task/{thread.native_id}")


@pytest.fixture
def process_groups() -> ModuleType:
    """Imports torch, which each process that only collects tests would import, too."""
    from ddplaunch.features.dry_run.fake_cuda import process_groups

    return process_groups


@pytest.fixture
def pauses(process_groups: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; each seems to last for 0.3 s."""
    made: list[float] = []
    monkeypatch.setattr(
        process_groups, "time", SimpleNamespace(sleep=made.append, monotonic=lambda: time.monotonic() + 0.3 * len(made))
    )
    return made


def test_a_running_thread_of_gloo_is_waited_for_and_not_for_ever(
    process_groups: ModuleType, start_computing: Start, pauses: list[float]
):
    start_computing("pt_gloo_runloop")
    wait_until(lambda: process_groups.wait_for_rest() or pauses)
    assert len(pauses) <= 4


def test_other_threads_are_not_waited_for(process_groups: ModuleType, start_computing: Start, pauses: list[float]):
    start_computing("pt_data_pin")
    for _ in range(100):
        process_groups.wait_for_rest()
    assert not pauses
