"""The agent's socket for workers: a connection says of which feature it is, and no other feature gets it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ddplaunch import features
from ddplaunch.agent import parts
from ddplaunch.agent.parts import Part
from ddplaunch.features.debug.agent import DebugPart
from ddplaunch.features.hangs.examiner import Examiner
from ddplaunch.mailbox import Mailbox
from ddplaunch.system.unix_socket import Connection, LocalServer
from ddplaunch.worker.parts import connect

NO_NODE: Any = None


class Asked(Part):
    """The part of a feature that keeps its connections."""

    def __init__(self, feature: str) -> None:
        super().__init__(NO_NODE)
        self.feature = feature
        self.taken: Mailbox[Connection] = Mailbox()

    def on_connection(self, connection: Connection) -> bool:
        self.taken.post(connection)
        return True

    def has_nothing(self) -> bool:
        return self.taken.get(0.0) is None


class Agent:
    """An agent of which only the socket runs."""

    def __init__(self, *asked: Part) -> None:
        self.server = LocalServer("workers", lambda connection: parts.on_connection(asked, connection))
        self.name = self.server.open()

    def closes(self, worker: socket.socket) -> bool:
        worker.settimeout(60)
        return worker.recv(1) == b""


@pytest.mark.parametrize("order", [("debug", "third"), ("third", "debug")], ids=str)
def test_each_feature_gets_the_connections_of_its_own_workers_whatever_the_order(order: tuple[str, ...]) -> None:
    asked = {name: Asked(name) for name in order}
    agent = Agent(*asked.values())
    for name, part in asked.items():
        with connect(agent.name, name) as worker:
            worker.sendall(b"x")
            found = part.taken.get(float("inf"))
            assert found
            with found.socket:
                assert (found.pid, found.socket.recv(1)) == (os.getpid(), b"x")
        assert all(other.has_nothing() for other in asked.values())
    agent.server.close()


@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"\0",
        b"\0ddplaunch",
        b"\0ddplaunch.third",
        b"\0ddplaunch..1",
        b"\0ddplaunch.other.1",
        b"\0ddplaunch.third.more.1",
        b"\0DDPLAUNCH.third.1",
        b"\0\xff\n.third.1",
        b"\0" + b"." * 107,
    ],
)
def test_a_connection_of_no_feature_is_closed(address: bytes) -> None:
    third = Asked("third")
    agent = Agent(third)
    with socket.socket(socket.AF_UNIX) as worker:
        if address:
            worker.bind(address + os.urandom(4) if address == b"\0" else address)
        worker.connect(f"\0{agent.name}")
        assert agent.closes(worker)
    assert third.has_nothing()
    agent.server.close()


def test_a_connection_from_a_file_is_closed(tmp_path: Path) -> None:
    third = Asked("third")
    agent = Agent(third)
    with socket.socket(socket.AF_UNIX) as worker:
        worker.bind(f"{tmp_path}/ddplaunch.third.1")
        worker.connect(f"\0{agent.name}")
        assert agent.closes(worker)
    assert third.has_nothing()
    agent.server.close()


def test_who_has_too_many_connections_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("hangs.examiner._MAX_CONNECTIONS", "debug.agent._MAX_SESSIONS"):
        monkeypatch.setattr(f"ddplaunch.features.{module}", 0)
    debug = DebugPart(NO_NODE)
    debug.feature = "debug"
    agent = Agent(debug)
    with connect(agent.name, "debug") as worker:
        assert agent.closes(worker)
    agent.server.close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not Examiner().take(Connection(ours, os.getpid(), b""))


def test_the_address_of_a_connection_is_its_own_and_names_the_feature() -> None:
    first, second = features.worker_address("third"), features.worker_address("third")
    assert first != second
    assert features.of_worker_address(first) == features.of_worker_address(second) == "third"


def test_a_worker_learns_that_the_agent_has_gone() -> None:
    with pytest.raises(ConnectionRefusedError):
        connect(f"ddplaunch.{os.urandom(8).hex()}", "third")
