"""When the page of a run is made: not before anybody could look, then every half minute, and at the end."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.config import OutputConfig
from ddplaunch.features.page import launcher as run_page
from ddplaunch.features.page import make
from ddplaunch.features.page.launcher import RunPage
from ddplaunch.launcher.watches import RunEnd
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.protocol.results import AttemptResult, Outcome
from ddplaunch.protocol.run_result import RunResult
from tests.support import golden
from tests.support.watches import run_services

STARTED = AttemptStarted(0, 1, (11,), 0, 1, 0)
FAILED = AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(), duration_s=1.0))


def end(outcome: Outcome, duration_s: str, is_interrupted: Callable[[], bool] = bool) -> RunEnd:
    result = RunResult("job7", 0, outcome, float(duration_s), attempts=(FAILED.result,))
    return RunEnd(result, None, {}, is_interrupted)


class Run:
    """The page of a run whose workers start at 1000 s. Its methods are the steps of a story."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path | None, *, is_on: bool) -> None:
        self.said: list[str] = []
        self.children: list[Child] = []
        self.now, self.folder = 1000.0, folder or Path()
        monkeypatch.delenv(run_page.OFF_VARIABLE, raising=False)
        monkeypatch.setattr(run_page, "_Child", lambda _: Child(self))
        monkeypatch.setattr(run_page.time, "monotonic", lambda: self.now)
        config = LaunchConfig(script="train.py", output=OutputConfig(page=is_on))
        show = lambda text, _level: self.said.append(f"shows: {text}")  # noqa: E731
        self.page = RunPage(run_services(config, folder=folder, show=show))
        self.page.on_event(0, STARTED)

    def due(self, now: str) -> None:
        self.said.append(f"due again at {self.page.run_due(float(now))}")

    def fails(self, node: str) -> None:
        self.page.on_event(int(node), FAILED)

    def made(self, number: str, duration_s: str = "0.1") -> None:
        """The process with this number has ended."""
        child = self.children[int(number)]
        child.duration_s = float(duration_s)
        child.ended.set()

    def finds_page(self) -> None:
        (self.folder / make.FILE).touch()

    def killed(self, number: str) -> None:
        self.children[int(number)].kill()

    def ends(self, duration_s: str, has_failed: str = "") -> None:
        self.page.on_run_ended(end("failed" if has_failed else "succeeded", duration_s))

    def wait(self, duration_s: str, signal: str = "") -> None:
        """Wait for the last page, each look at the clock a second later."""

        def is_interrupted() -> bool:
            self.now += 1.0
            return bool(signal)

        self.page.finish(end("succeeded", duration_s, is_interrupted))
        self.said.append(f"after {self.now - 1000:g} s")


class Child:
    """In place of a process that makes a page."""

    def __init__(self, run: Run) -> None:
        self.ended, self.duration_s = threading.Event(), 0.1
        self._said, self._number = run.said, len(run.children)
        run.children.append(self)
        self._said.append(f"process {self._number} is prepared")

    def begin(self) -> None:
        self._said.append(f"process {self._number} makes the page")

    def kill(self) -> None:
        self._said.append(f"process {self._number} is killed")
        self.ended.set()


def test_when_pages_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A story is whether the run has a folder and is to have a page, and steps."""

    def story(text: str) -> str:
        _, kind, steps = text.split(": ")
        folder = None if kind == "no folder" else Path(tempfile.mkdtemp(dir=tmp_path))
        return golden.play(Run(monkeypatch, folder, is_on=kind != "no page"), steps)

    golden.check_pages("run_pages", story)


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_child_that_is_killed_leaves_nothing(tmp_path: Path, is_begun: bool):
    child = run_page._Child(tmp_path)
    (tmp_path / f".{make.FILE}.{child._process.pid}.0a1b2c3d.part").touch()
    os.kill(child._process.pid, signal.SIGSTOP)
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
