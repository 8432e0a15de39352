"""Trouble ends a run once, however many nodes tell of it."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.cluster.slurm import SlurmJob
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError
from ddplaunch.launcher.shutdown import Shutdown
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import StopWorkers
from ddplaunch.system.signals import SignalReceived


class Nodes:
    """Nodes that only hear."""

    connected = ()

    def __init__(self) -> None:
        self.sent: list[object] = []

    def stop_connecting(self) -> None: ...

    def send(self, record: object) -> None:
        self.sent.append(record)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def stopping_of(nodes: Nodes, shown: list[str], **config: object) -> Shutdown:
    logs, messages = (
        SimpleNamespace(on_signal=lambda _signum: False),
        SimpleNamespace(show=lambda text, *_: shown.append(text)),
    )
    return Shutdown(LaunchConfig(script="train.py", **config), nodes, logs, messages)  # type: ignore[arg-type]


def test_a_viewer_that_stops_the_run_belongs_to_a_signal_of_its_moment(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    """Two viewers may both have asked their users before the run was stopped, so their moment is longer."""
    stopping = stopping_of(nodes, [])
    for now in (100.0, 102.9):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        stopping.on_stop_request()
    stopping.on_signal(SignalReceived(signal.SIGTERM, 100.1))
    assert nodes.sent == [StopWorkers(15, 30.0)]
    monkeypatch.setattr("time.monotonic", lambda: 103.0)
    stopping.on_stop_request()
    assert nodes.sent[1:] == [StopWorkers(15, 5.0)]


def test_ctrl_c_after_a_debugger_was_quit_is_the_second(nodes: Nodes):
    stopping = stopping_of(nodes, [])
    stopping.on_quit("rank 0")
    stopping.on_signal(SignalReceived(signal.SIGINT, time.monotonic() + 0.5))
    assert nodes.sent == [StopWorkers(15, 0.5), StopWorkers(15, 5.0)]


def test_after_the_run_only_another_request_to_stop_interrupts_what_follows(nodes: Nodes):
    """Else the second signal of SLURM, or one that stops nothing, would end --on-exit."""
    stopping, mailbox = stopping_of(nodes, []), Mailbox[object]()
    stopping.on_signal(SignalReceived(signal.SIGTERM, 100.0))
    for event in (SignalReceived(signal.SIGTERM, 100.06), SignalReceived(signal.SIGUSR1, 104.0)):
        mailbox.post(event)
    assert stopping.collect_signals(mailbox) == stopping.requests.count == 1
    mailbox.post(SignalReceived(signal.SIGTERM, 104.0))
    assert stopping.collect_signals(mailbox) == 2


def test_a_signal_that_requeues_counts_once_however_late_it_comes_again(nodes: Nodes):
    job = SlurmJob(id="7", requeue_on=("SIGTERM",))
    stopping = stopping_of(nodes, [], slurm_job=job)
    for received_at in (100.0, 109.0):
        stopping.on_signal(SignalReceived(signal.SIGTERM, received_at))
    assert nodes.sent == [StopWorkers(15, 30.0)]


def test_nodes_that_fail_alike_are_told_to_stop_once_and_the_first_counts():
    nodes = Nodes()
    config = LaunchConfig(script="train.py", hosts=(Host("a"), Host("b")), min_nodes=2, max_nodes=2)
    stopping = Shutdown(config, nodes, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for host in ("a", "b"):
        stopping.fail(LaunchError(f"{host}: no such script", "", 82))
    assert stopping.error
    assert stopping.error.message == "a: no such script"
    assert nodes.sent == [StopWorkers(15, config.timeouts.shutdown_timeout_s)]
