"""A run leaves its terminal only if nobody needs it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.features.come_back import launcher
from ddplaunch.protocol.control import LeaveTerminal, RequestGranted, RequestRefused
from ddplaunch.system import signals
from tests.support.watches import ignore, run_services

WRITES = "its only worker writes to the terminal itself (not with -t 3)"
STARTS = "its workers have not started yet"
SAID = "terminal_left: the run goes on without this terminal, which can be closed; to come back: ddplaunch --attach r1"
PYTHON = "it was started by a Python program, which has the terminal"


@pytest.mark.parametrize(
    ("has_workers", "has_terminal", "is_own", "refused"),
    [(True, False, True, ""), (True, True, True, WRITES), (False, False, True, STARTS), (True, False, False, PYTHON)],
)
def test_what_needs_the_terminal_keeps_it(
    has_workers: bool, has_terminal: bool, is_own: bool, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``is_own``: the launcher is the command."""
    done: list[object] = []
    monkeypatch.setattr(signals, "owns_terminal", is_own)
    monkeypatch.setattr(launcher, "_leave_terminal", lambda: done.append("left"))
    nodes = SimpleNamespace(all=[SimpleNamespace(handle=SimpleNamespace(inherited_fds={}))])
    console = SimpleNamespace(wait_shown=ignore, leave_terminal=lambda: done.append("leaves"))
    messages = SimpleNamespace(
        run_id="r1",
        console=console,
        has_workers=has_workers,
        worker_has_terminal=lambda _: has_terminal,
        show=lambda text, _level, kind: done.append(f"{kind}: {text}"),
    )
    (watch,) = launcher.watches(run_services(LaunchConfig(script="x.py"), nodes=nodes, messages=messages))
    assert watch.on_request(LeaveTerminal("tag"), done.append)
    assert done == ([RequestRefused(refused)] if refused else [SAID, "leaves", "left", RequestGranted()])
