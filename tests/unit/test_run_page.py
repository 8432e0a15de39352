"""When the page of a run is made: not before anybody could look, then every half minute, and at the end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.config import OutputConfig
from ddplaunch.features.page import launcher as run_page
from ddplaunch.features.page import make
from ddplaunch.features.page.launcher import FIRST_S, PERIOD_S, RunPage
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.protocol.results import AttemptResult

STARTED = AttemptStarted(0, 1, (11,), 0, 1, 0)
FAILED = AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(), duration_s=1.0))


class Child:
    """In place of a process."""

    prepared: list[Path]
    made: list[Path]

    def __init__(self, folder: Path) -> None:
        self.ended, self.duration_s, self._folder = threading.Event(), 0.1, folder
        self.prepared.append(folder)

    def begin(self) -> None:
        self.made.append(self._folder)

    def kill(self) -> None:
        self.ended.set()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    Child.prepared, Child.made = [], []
    monkeypatch.delenv(run_page.OFF_VARIABLE)
    monkeypatch.setattr(run_page, "_Child", Child)
    monkeypatch.setattr(run_page.time, "monotonic", lambda: 1000.0)
    return Child.made


def page_of(tmp_path: Path, *, is_on: bool = True) -> RunPage:
    config = LaunchConfig(script="train.py", output=OutputConfig(page=is_on))
    page = RunPage(config, lambda: tmp_path)
    page.on_event(0, (0,), STARTED)
    return page


def test_the_first_page_is_made_after_half_a_minute_and_then_again(tmp_path: Path, made: list[Path]):
    page = page_of(tmp_path)
    assert page.run_due(1000.0) == 1000.0 + FIRST_S
    assert made == []
    assert page.run_due(1030.0) == 1030.0 + PERIOD_S
    assert made == [tmp_path]
    page.run_due(1061.0)  # The first process has not ended.
    assert len(made) == 1
    page._child.ended.set()  # type: ignore[union-attr]
    page.run_due(1091.0)
    assert len(made) == 2


def test_a_page_that_takes_long_is_made_less_often(tmp_path: Path, made: list[Path]):
    page = page_of(tmp_path)
    page.run_due(1030.0)
    page._child.duration_s = 5.0  # type: ignore[union-attr]
    page._child.ended.set()  # type: ignore[union-attr]
    assert page.run_due(1060.0) == 1160.0


def test_without_a_folder_or_with_no_page_nothing_is_made(tmp_path: Path, made: list[Path]):
    page = page_of(tmp_path, is_on=False)
    assert page.run_due(2000.0) == float("inf")
    page.on_event(0, (0,), FAILED)
    page.begin_last(3600.0, has_failed=True)
    RunPage(LaunchConfig(script="train.py"), lambda: None).begin_last(3600.0, has_failed=True)
    assert Child.prepared == []
    assert made == []


def test_a_short_run_has_no_page(tmp_path: Path, made: list[Path]):
    page = page_of(tmp_path)
    page.begin_last(9.9, has_failed=False)
    page.wait_for_last(9.9, lambda: pytest.fail("waits"))
    assert made == []


def test_a_short_run_that_failed_has_one_whose_modules_are_loaded_ahead(tmp_path: Path, made: list[Path]):
    page = page_of(tmp_path)
    page.on_event(0, (0,), FAILED)
    page.on_event(1, (0,), FAILED)
    assert (Child.prepared, made) == ([tmp_path], [])
    page.begin_last(0.5, has_failed=True)
    assert (Child.prepared, made) == ([tmp_path], [tmp_path])


def test_what_was_prepared_and_is_not_needed_is_ended(tmp_path: Path, made: list[Path]):
    page = page_of(tmp_path)
    page.on_event(0, (0,), FAILED)
    page.begin_last(0.5, has_failed=False)
    assert page._prepared.ended.is_set()  # type: ignore[union-attr]
    assert made == []


def test_a_page_that_is_being_made_is_not_waited_for_at_the_end(tmp_path: Path, made: list[Path]):
    """It would not have the report."""
    page = page_of(tmp_path)
    page.run_due(1030.0)
    child = page._child
    page.begin_last(31.0, has_failed=False)
    assert child.ended.is_set()  # type: ignore[union-attr]
    assert len(made) == 2


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_child_that_is_killed_leaves_nothing(tmp_path: Path, is_begun: bool):
    child = run_page._Child(tmp_path)
    (tmp_path / f".{make.FILE}.{child._pid}.0a1b2c3d.part").touch()
    os.kill(child._pid, signal.SIGSTOP)
    if is_begun:
        child.begin()
    child.kill()
    assert child.ended.wait(30)
    child.begin()
    assert list(tmp_path.iterdir()) == []


def test_a_child_whose_launcher_has_gone_makes_nothing(tmp_path: Path):
    child = run_page._Child(tmp_path)
    child._go.close()
    assert child.ended.wait(30)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_the_wait_and_the_child(tmp_path: Path, made: list[Path]):
    page = page_of(tmp_path)
    page.begin_last(3600.0, has_failed=False)
    page.wait_for_last(3600.0, lambda: True)
    assert page._child.ended.is_set()  # type: ignore[union-attr]


def test_a_page_that_takes_too_long_is_given_up(tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch):
    page = page_of(tmp_path)
    page.begin_last(60.0, has_failed=False)
    times = iter((1000.0, 1002.9, 1003.1))
    monkeypatch.setattr(run_page.time, "monotonic", lambda: next(times))
    page.wait_for_last(60.0, lambda: False)
    assert page._child.ended.is_set()  # type: ignore[union-attr]
    assert not list(times)
