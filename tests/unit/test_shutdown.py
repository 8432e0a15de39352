"""Trouble ends a run once, however many nodes tell of it."""

from __future__ import annotations

from types import SimpleNamespace

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError
from ddplaunch.launcher.shutdown import Shutdown
from ddplaunch.protocol.launcher_agent import StopWorkers


class Nodes:
    """Nodes that only hear."""

    connected = ()

    def __init__(self) -> None:
        self.sent: list[object] = []

    def stop_connecting(self) -> None: ...

    def send(self, record: object) -> None:
        self.sent.append(record)


def test_nodes_that_fail_alike_are_told_to_stop_once_and_the_first_counts():
    nodes = Nodes()
    config = LaunchConfig(script="train.py", hosts=(Host("a"), Host("b")), min_nodes=2, max_nodes=2)
    injector = SimpleNamespace(release=lambda: None)
    stopping = Shutdown(config, nodes, injector, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for host in ("a", "b"):
        stopping.fail(LaunchError(f"{host}: no such script", "", 82))
    assert stopping.error
    assert stopping.error.message == "a: no such script"
    assert nodes.sent == [StopWorkers(15, config.timeouts.shutdown_s)]
