"""Trouble ends a run once, however many nodes tell of it."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError
from ddplaunch.launcher.nodes import NodeState
from ddplaunch.launcher.shutdown import Shutdown
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import StopWorkers
from ddplaunch.system.signals import SignalReceived
from tests.support import golden


class Run:
    """A run of two nodes. Its methods are the steps of a story."""

    connected: tuple[Any, ...] = ()

    def __init__(self, monkeypatch: pytest.MonkeyPatch, follows: str = "") -> None:
        self.said: list[str] = []
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        messages = SimpleNamespace(show=lambda *_: None)
        hosts = {"hosts": (Host("a"), Host("b")), "min_nodes": 2, "max_nodes": 2}
        config = LaunchConfig(script="train.py", **hosts)  # type: ignore[arg-type]
        self.stopping = Shutdown(config, self, messages, lambda _: False, lambda _: follows)  # type: ignore[arg-type]

    def stop_connecting(self) -> None: ...

    def send(self, record: StopWorkers) -> None:
        self.said.append(f"stop with signal {int(record.signum)} within {record.grace_s} s")

    def at(self, now: str) -> None:
        self.now = float(now)

    def viewer(self) -> None:
        """A viewer's user asks to stop the run."""
        self.stopping.on_stop_request()

    def quit(self) -> None:
        """A debugger was quit."""
        self.stopping.on_quit("rank 0")

    def signal(self, name: str, received_at: str) -> None:
        self.stopping.on_signal(SignalReceived(signal.Signals[name], float(received_at)))

    def time_is_up(self) -> None:
        """A watch stops the run, which is to go on later."""
        self.stopping.stop_to_continue(signal.SIGUSR1, 285.0, "the time limit is 5 min away")

    def outcome_known(self) -> None:
        self.stopping.outcome_known_at = self.now

    def late(self) -> None:
        """Whether the outcome was known before the first signal."""
        self.said.append(f"late: {self.stopping.came_late}")

    def fail(self, host: str) -> None:
        self.stopping.fail(LaunchError(f"{host}: no such script", "", 82))
        assert self.stopping.error
        self.said.append(f"error: {self.stopping.error.message}")


def test_a_run_is_stopped_once_and_at_once_if_that_is_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    def story(text: str) -> str:
        name, _, steps = text.partition(": ")
        return golden.play(Run(monkeypatch, "a requeue" if "requeues" in name else ""), steps)

    golden.check_pages("shutdowns", story)


@pytest.mark.parametrize("by_bug", [True, False], ids=["a bug", "another error"])
def test_an_agent_that_a_part_holds_is_killed_in_time_only_after_a_bug(by_bug: bool, monkeypatch: pytest.MonkeyPatch):
    run, killed = Run(monkeypatch), []
    run.connected = (
        SimpleNamespace(host="a", state=NodeState.HELD, handle=SimpleNamespace(kill=lambda: killed.append("a"))),
    )
    if by_bug:
        run.stopping.on_bug("KeyError")
    else:
        run.fail("a")
    kill_at = run.stopping.run_due(run.now)
    assert killed == []
    run.stopping.run_due(kill_at)
    assert killed == (["a"] if by_bug else [])


def test_after_the_run_only_another_request_to_stop_interrupts_what_follows(monkeypatch: pytest.MonkeyPatch):
    """Else the second signal of SLURM, or one that stops nothing, would end --on-exit."""
    stopping, mailbox = Run(monkeypatch).stopping, Mailbox[object]()
    stopping.on_signal(SignalReceived(signal.SIGTERM, 100.0))
    for event in (SignalReceived(signal.SIGTERM, 100.06), SignalReceived(signal.SIGUSR1, 104.0)):
        mailbox.post(event)
    assert stopping.collect_signals(mailbox) == stopping.requests.count == 1
    mailbox.post(SignalReceived(signal.SIGTERM, 104.0))
    assert stopping.collect_signals(mailbox) == 2
