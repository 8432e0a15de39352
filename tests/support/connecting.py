"""Handles on agents of a lab's nodes, and what they post."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.features.remote.remote_start import RemoteStart
from ddplaunch.features.ssh.connections import Connections
from ddplaunch.features.ssh.handle import SshHandle
from ddplaunch.features.ssh.listener import AgentListener
from ddplaunch.protocol import environment
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import ChannelClosed, NodeFacts, Post, discard_output
from tests.support.nodes import Lab
from tests.support.runs import ROOT

TIMEOUT_S = 60.0


def echo_start(**changes: Any) -> RemoteStart:
    """Starts the echo agent of ``programs`` in place of the real one."""
    env = {"PYTHONPATH": str(ROOT), environment.RUN_ID: "echo.1", **changes.pop("env", {})}
    plain = {"python": sys.executable, "cwd": "/tmp", "entry": "tests.support.programs.echo_agent"}
    return RemoteStart(**{**plain, **changes}, env=env)


def handle(
    host: Host,
    start: RemoteStart,
    connections: Connections,
    post: Post,
    listener: AgentListener | None = None,
    on_not_connected: Callable[[str], object] = print,
) -> SshHandle:
    """A handle of an agent that connects to the launcher if there is a ``listener``."""
    if not listener:
        return SshHandle(host, start, connections, post, discard_output)
    given, start = partial(listener.given, str(host)), replace(start, connects=True)
    made = SshHandle(host, start, connections, post, discard_output, given, on_not_connected)
    listener.expect(str(host), made)
    return made


def listener_of(connections: Connections, **settings: Any) -> AgentListener:
    """Listens for agents."""
    return AgentListener(connections.io, LaunchConfig(script="x.py", hosts=(Host("a"),), **settings))


@dataclass
class Connecting:
    """Some handles and the queue of what they post, as (host, event)."""

    lab: Lab
    connections: Connections
    listener: AgentListener | None = None
    not_connected: list[str] = field(default_factory=list)
    handles: dict[str, SshHandle] = field(default_factory=dict)
    posted: queue.SimpleQueue[tuple[str, object]] = field(default_factory=queue.SimpleQueue)
    events: list[tuple[str, object]] = field(default_factory=list)

    def start(self, *hosts: str | Host, **changes: Any) -> None:
        """Connect to hosts, by default to all nodes of the lab."""
        for host in hosts or [node.name for node in self.lab.nodes]:
            named = host if isinstance(host, Host) else Host(host)

            def post(event: object, name: str = str(named)) -> None:
                self.posted.put((name, event))

            self.handles[str(named)] = handle(
                named, echo_start(**changes), self.connections, post, self.listener, self._on_not_connected
            )

    def _on_not_connected(self, reason: str) -> None:
        self.not_connected.append(reason)
        if self.listener:
            self.listener.some_cannot_connect = True

    def of(self, kind: type, host: str = "") -> list[Any]:
        """The events of a kind so far, of one host or of all."""
        return [event for name, event in self.events if isinstance(event, kind) and host in ("", name)]

    def wait_for(self, kind: type, count: int = 1, host: str = "", timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Take events until there are ``count`` of a kind."""
        deadline = time.monotonic() + timeout_s
        while len(self.of(kind, host)) < count:
            try:
                self.events.append(self.posted.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise TimeoutError(f"{count} x {kind.__name__} not among {self.events}") from None
        return self.of(kind, host)

    def settle(self, count: int = 0) -> tuple[list[NodeFacts], list[HostFailure]]:
        """Wait until all (or ``count``) handles have connected or failed."""
        count = count or len(self.handles)
        while len(self.of(NodeFacts)) + len(self.of(HostFailure)) < count:
            self.events.append(self.posted.get(timeout=TIMEOUT_S))
        return self.of(NodeFacts), self.of(HostFailure)

    def texts(self, host: str = "") -> list[str]:
        """What the agents have said in notices."""
        return [notice.text for notice in self.of(Notice, host)]


@contextmanager
def connecting(lab: Lab, *, connects: bool = False, **settings: Any) -> Iterator[Connecting]:
    """Settings as for ``Remote``; the lab's own ssh_config is the default. All handles are closed at the end.

    ``connects``: agents connect to the launcher.
    """
    with lab.inside():
        connections = Connections(
            RemoteConfig(**{"config": str(lab.ssh_config), "connect_timeout_s": 20.0, **settings})
        )
        them = Connecting(lab, connections, listener_of(connections) if connects else None)
        try:
            yield them
        finally:
            for handle in them.handles.values():
                handle.end_input()
            for handle in them.handles.values():
                handle.close()
            connections.close()
            if them.listener:
                them.listener.close()


__all__ = ["ChannelClosed", "Connecting", "connecting", "echo_start", "handle", "listener_of"]
