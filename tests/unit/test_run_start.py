"""The start of a run's nodes: a signal stops it between two nodes, and other events wait until all are started."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from ddplaunch.launcher import setup
from ddplaunch.launcher.run import Run
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import AgentEnded, AgentFailed, StopWorkers
from ddplaunch.system.signals import SignalReceived
from ddplaunch.transport.handle import AgentLost, FromNode
from tests.support.configs import launch_config
from tests.support.fake_agents import FakeHandle, FakeTransport

NODES = 100


class StoppableHandle(FakeHandle):
    """An agent that ends when it is told to."""

    def __init__(self, post: Callable[[object], None]) -> None:
        super().__init__()
        self._post = post

    def wake(self) -> None: ...

    def close(self, timeout_s: float | None = None) -> int:  # type: ignore[override]
        return 0

    def send(self, record: object) -> None:
        super().send(record)
        if isinstance(record, StopWorkers):
            self._post(AgentEnded())
            self._post(AgentLost())


class CountingTransport(FakeTransport):
    """Starts agents here; ``at[N]`` is posted after the start of ``N`` agents."""

    is_remote = False

    def __init__(self, post: Callable[[object], None], at: dict[int, object]) -> None:
        super().__init__(*(f"node{number}" for number in range(NODES)))
        self.started = 0
        self._post, self._at = post, at

    def start(self, index: int) -> FakeHandle:
        self.started += 1
        if self.started in self._at:
            self._post(self._at[self.started])
        return StoppableHandle(lambda event: self._post(FromNode(index, event)))

    def close(self) -> None: ...


def started_until(at: dict[int, object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, Run]:
    mailbox: Mailbox[object] = Mailbox()
    transport = CountingTransport(mailbox.post, at)
    monkeypatch.setattr(setup, "transport_for", lambda *_: transport)
    config = launch_config(script="x.py", dry_run=True, min_nodes=NODES, max_nodes=NODES, log_dir="/dev/null")
    run = Run(config, "r1", "r1", None, mailbox, 1)
    run._start_nodes()
    return transport.started, run


def test_a_signal_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started, run = started_until({3: SignalReceived(signal.SIGINT)}, monkeypatch)
    assert started == 3
    assert run._shutdown.signals == [signal.SIGINT]


def test_other_events_are_handled_once_all_nodes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started, run = started_until({3: FromNode(0, AgentFailed("no room", "", 82))}, monkeypatch)
    assert started == NODES
    assert run._shutdown.error
    assert run._shutdown.error.message == "no room"
