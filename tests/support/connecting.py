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
from ddplaunch.features.ssh.calls import Calls
from ddplaunch.features.ssh.connections import Connections
from ddplaunch.features.ssh.handle import SshHandle
from ddplaunch.protocol import environment
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import AgentConnected, ChannelClosed, Post, discard_output
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
    calls: Calls | None = None,
    on_not_called: Callable[[str], object] = print,
) -> SshHandle:
    """A handle of an agent that connects to the launcher if there are ``calls``."""
    if not calls:
        return SshHandle(host, start, connections, post, discard_output)
    given, start = partial(calls.given, str(host)), replace(start, calls=True)
    made = SshHandle(host, start, connections, post, discard_output, given, on_not_called)
    calls.expect(str(host), made)
    return made


def calls_of(connections: Connections, **settings: Any) -> Calls:
    """Listens for agents."""
    return Calls(connections.io, LaunchConfig(script="x.py", hosts=(Host("a"),), **settings))


@dataclass
class Connecting:
    """Some handles and the queue of what they post, as (host, event)."""

    lab: Lab
    connections: Connections
    calls: Calls | None = None
    not_called: list[str] = field(default_factory=list)
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
                named, echo_start(**changes), self.connections, post, self.calls, self._on_not_called
            )

    def _on_not_called(self, reason: str) -> None:
        self.not_called.append(reason)
        if self.calls:
            self.calls.some_cannot_connect = True

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

    def settle(self, count: int = 0) -> tuple[list[AgentConnected], list[HostFailure]]:
        """Wait until all (or ``count``) handles have connected or failed."""
        count = count or len(self.handles)
        while len(self.of(AgentConnected)) + len(self.of(HostFailure)) < count:
            self.events.append(self.posted.get(timeout=TIMEOUT_S))
        return self.of(AgentConnected), self.of(HostFailure)

    def texts(self, host: str = "") -> list[str]:
        """What the agents have said in notices."""
        return [notice.text for notice in self.of(Notice, host)]


@contextmanager
def connecting(lab: Lab, *, calls: bool = False, **settings: Any) -> Iterator[Connecting]:
    """Settings as for ``Remote``; the lab's own ssh_config is the default. All handles are closed at the end.

    ``calls``: agents connect to the launcher.
    """
    with lab.inside():
        connections = Connections(
            RemoteConfig(**{"config": str(lab.ssh_config), "connect_timeout_s": 20.0, **settings})
        )
        them = Connecting(lab, connections, calls_of(connections) if calls else None)
        try:
            yield them
        finally:
            for handle in them.handles.values():
                handle.end_input()
            for handle in them.handles.values():
                handle.close()
            connections.close()
            if them.calls:
                them.calls.close()


__all__ = ["ChannelClosed", "Connecting", "calls_of", "connecting", "echo_start", "handle"]
