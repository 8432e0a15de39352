"""Trouble ends a run once, however many nodes tell of it."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError
from ddplaunch.launcher import shutdown
from ddplaunch.launcher.shutdown import Shutdown
from ddplaunch.protocol.launcher_agent import StopWorkers

INJECTOR = SimpleNamespace(release=lambda: None)


class Nodes:
    """Nodes that only hear."""

    connected = ()

    def __init__(self) -> None:
        self.sent: list[object] = []

    def stop_connecting(self) -> None: ...

    def send(self, record: object) -> None:
        self.sent.append(record)


def test_the_second_signal_sends_sigterm_with_a_short_grace_and_the_third_kills():
    nodes, shown = Nodes(), []
    messages = SimpleNamespace(show=lambda text, *_: shown.append(text))
    logs = SimpleNamespace(on_signal=lambda _signum: False)
    stopping = Shutdown(LaunchConfig(script="train.py"), nodes, INJECTOR, logs, messages)  # type: ignore[arg-type]
    for _ in range(3):
        stopping.on_signal(signal.SIGINT)
    assert nodes.sent == [StopWorkers(2, 30.0), StopWorkers(15, 5.0), StopWorkers(15, 0.0)]
    assert shown == [
        "SIGINT: stopping the workers, SIGKILL in 30 s; again: SIGKILL in 5 s",
        "SIGINT: stopping the workers by SIGTERM, SIGKILL in 5 s; again: SIGKILL at once",
        "SIGINT: stopping the workers, SIGKILL at once",
    ]


def test_two_viewers_that_stop_the_run_at_once_do_not_shorten_its_grace_period(monkeypatch: pytest.MonkeyPatch):
    nodes = Nodes()
    logs, messages = SimpleNamespace(on_signal=lambda _signum: False), SimpleNamespace(show=lambda *_: None)
    stopping = Shutdown(LaunchConfig(script="train.py"), nodes, INJECTOR, logs, messages)  # type: ignore[arg-type]
    for _ in range(2):
        stopping.on_stop_request()
    assert nodes.sent == [StopWorkers(15, 30.0)]
    monkeypatch.setattr(shutdown, "_ONCE_S", 0.0)
    stopping.on_stop_request()
    assert nodes.sent[1:] == [StopWorkers(15, 5.0)]


def test_nodes_that_fail_alike_are_told_to_stop_once_and_the_first_counts():
    nodes = Nodes()
    config = LaunchConfig(script="train.py", hosts=(Host("a"), Host("b")), min_nodes=2, max_nodes=2)
    stopping = Shutdown(config, nodes, INJECTOR, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for host in ("a", "b"):
        stopping.fail(LaunchError(f"{host}: no such script", "", 82))
    assert stopping.error
    assert stopping.error.message == "a: no such script"
    assert nodes.sent == [StopWorkers(15, config.timeouts.shutdown_timeout_s)]
