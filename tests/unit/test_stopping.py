"""Trouble ends a run once, however many nodes tell of it."""

from __future__ import annotations

from types import SimpleNamespace

from ddplaunch.config import LaunchConfig
from ddplaunch.hosts import Host
from ddplaunch.launcher.stopping import Stopping
from ddplaunch.records import AgentFailed, StopWorkers


class Nodes:
    """Nodes that only hear."""

    running = ()

    def __init__(self) -> None:
        self.sent: list[object] = []

    def abandon(self) -> None: ...

    def send(self, record: object) -> None:
        self.sent.append(record)


def test_nodes_that_fail_alike_are_told_to_stop_once_and_the_first_counts():
    nodes = Nodes()
    config = LaunchConfig(script="train.py", hosts=(Host("a"), Host("b")), min_nodes=2, max_nodes=2)
    injector = SimpleNamespace(release=lambda: None)
    stopping = Stopping(config, nodes, injector, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for host in ("a", "b"):
        stopping.fail(AgentFailed(f"{host}: no such script", "", 82))
    assert stopping.failed == AgentFailed("a: no such script", "", 82)
    assert nodes.sent == [StopWorkers(15, config.shutdown_timeout_s)]
