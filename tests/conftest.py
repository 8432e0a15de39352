"""What holds for every test: a state folder of its own, and no process left behind."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.processes import command_line, pids_with, wait_until

_VANISH_S = 5.0

# Machines are shared and noisy: no example is timed.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every process of a test carries the test's mark in its environment; at its end none may be alive."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("DDPLAUNCH_TEST_MARK", mark)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith(("PET_", "TORCHELASTIC_", "SLURM_"))]:
        monkeypatch.delenv(name)
    yield
    line = f"DDPLAUNCH_TEST_MARK={mark}"
    try:
        wait_until(lambda: not pids_with(line), _VANISH_S)
    except TimeoutError:
        left = pids_with(line)
        names = [f"{pid} {command_line(pid)}" for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"left running: {names}")


@pytest.fixture(params=["forkserver", "spawn"])
def start_method(request: pytest.FixtureRequest) -> str:
    """Both ways to start a worker must keep every promise."""
    return str(request.param)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """On CI a test that cannot run is a test that fails."""
    if os.environ.get("CI") == "true" and call.excinfo and call.excinfo.errisinstance(pytest.skip.Exception):
        call.excinfo = pytest.ExceptionInfo.from_exception(AssertionError(f"skipped on CI: {call.excinfo.value}"))
