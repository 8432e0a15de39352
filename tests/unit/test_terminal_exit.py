"""A run leaves its terminal only if nobody needs it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddplaunch.features.come_back import launcher
from ddplaunch.protocol.control import LeaveTerminal, RequestGranted, RequestRefused
from ddplaunch.system import signals


class Messages:
    """Those of a run, and its console; counts how often the terminal was left."""

    run_id, has_workers, left = "r1", True, 0

    def __init__(self, *, has_terminal: bool = False) -> None:
        self._has_terminal = has_terminal
        self.console, self.said = self, list[str]()

    def worker_has_terminal(self, _terminals: object) -> bool:
        return self._has_terminal

    def show(self, text: str, _level: int, kind: str) -> None:
        self.said.append(f"{kind}: {text}")

    def wait_shown(self, _timeout_s: float) -> None: ...

    def leave_terminal(self) -> None:
        self.left += 1


class Nodes:
    """One node, whose agent has inherited nothing."""

    def __init__(self) -> None:
        handle = type("Handle", (), {"inherited_fds": {}})
        self.all = [type("Node", (), {"handle": handle})]


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The terminal is the command's, and leaving it does nothing."""
    calls: list[str] = []
    monkeypatch.setattr(signals, "owns_terminal", True)
    monkeypatch.setattr(launcher, "_leave_terminal", lambda: calls.append("left"))
    return calls


def answer(messages: Messages) -> object:
    run = SimpleNamespace(nodes=Nodes(), messages=messages)
    answers: list[object] = []
    request = SimpleNamespace(request=LeaveTerminal("tag"), answer=answers.append)
    (watch,) = launcher.watches(run)  # type: ignore[arg-type]
    assert watch.on_request(request)  # type: ignore[arg-type]
    return answers[0]


def test_it_says_so_and_leaves(own: list[str]) -> None:
    messages = Messages()
    assert answer(messages) == RequestGranted()
    assert (own, messages.left) == (["left"], 1)
    back = "to come back: ddplaunch --attach r1"
    assert messages.said == [f"terminal_left: the run goes on without this terminal, which can be closed; {back}"]


def test_what_needs_the_terminal_keeps_it(own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its only worker writes" in answer(Messages(has_terminal=True)).reason  # type: ignore[attr-defined]
    starting = Messages()
    starting.has_workers = False
    assert answer(starting) == RequestRefused("its workers have not started yet")
    monkeypatch.setattr(signals, "owns_terminal", False)
    assert "started by a Python program" in answer(Messages()).reason  # type: ignore[attr-defined]
    assert own == []
