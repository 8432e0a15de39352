"""Agents that connect to the launcher: real nodes' shells, and strangers at the same port."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.features.remote import call_back, caller, io_thread, package, remote_start
from ddplaunch.features.remote.call_back import CallBackHandle, CallBackServer
from ddplaunch.features.remote.io_thread import Connection, IoThread
from ddplaunch.features.remote.remote_start import RemoteStart
from ddplaunch.protocol.launcher_agent import AgentEnded, Notice, Pong
from ddplaunch.system import limits, network
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import ChannelClosed, NodeFacts, discard_output
from ddplaunch.version import __version__
from tests.support.processes import is_alive, wait_until

START = RemoteStart(python=sys.executable, cwd="/", needs_torch=False, env={"DDPLAUNCH_RUN_ID": "tag.7"})
WAIT_S = 60.0
FACTS = b'{"pid": 7, "python": "3.11.0", "ddplaunch": "%s"}' % __version__.encode()
RUBBISH = (b"\0" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"records n7 x\n", b"\xff\xfe\n", b"a b c d e\n", b"x" * 2000)


class Launcher:
    """A server, and the handle of one node."""

    def __init__(self) -> None:
        self.io = IoThread("test")
        self.server = CallBackServer(self.io, network.listen("here", "127.0.0.1", 0))
        self.posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.handle = CallBackHandle(self.io, "node7", START, self.posted.put, discard_output)
        self.io.call(lambda: self.server.expect("n7", self.handle))
        self._nodes: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        for node in self._nodes:
            node.kill()
            node.communicate()
        self.handle.close()
        self.io.close()
        self.server.close()

    def node(
        self, name: str = "n7", *, port: int = 0, starts: Sequence[RemoteStart] = (START,)
    ) -> subprocess.Popen[bytes]:
        """What a step's task runs on a node, with its stdin."""
        given = caller.credentials(self.server.secret, port or self.server.port, "127.0.0.1")
        node = subprocess.Popen(
            ["/bin/sh", "-c", remote_start.COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "NODE": name, "NUMBER": "0"},
        )
        self._nodes.append(node)
        assert node.stdin
        node.stdin.write(caller.first_input(starts, "NODE", "NUMBER") + given)
        node.stdin.close()
        node.stdin = None
        return node

    def connect(self) -> socket.socket:
        """A stranger, who has read the greeting."""
        return socket.create_connection(("127.0.0.1", self.server.port))

    def get(self) -> object:
        return self.posted.get(timeout=WAIT_S)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with contextlib.closing(Launcher()) as launcher:
        yield launcher


def works(launcher: Launcher) -> None:
    """A node starts, and its agent answers."""
    node = launcher.node()
    connected = launcher.get()
    assert isinstance(connected, NodeFacts), connected
    agent = connected.pid
    assert b"DDPLAUNCH_RUN_ID=tag.7" in Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
    launcher.handle.end_input()
    assert [launcher.get(), launcher.get()] == [AgentEnded(), ChannelClosed()]
    assert node.communicate(timeout=WAIT_S)[0] == b"ddplaunch on n7\n"
    assert node.returncode == 0


def is_closed(stranger: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    stranger.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1 << 16):
            pass
    return True


def test_an_agent_has_the_tag_of_its_node_and_ends_with_its_connection(launcher: Launcher) -> None:
    node = launcher.node()
    connected = launcher.get()
    assert isinstance(connected, NodeFacts)
    launcher.handle.kill()
    assert launcher.get() == ChannelClosed()
    assert node.wait(WAIT_S) == 0
    assert not is_alive(connected.pid)


def test_a_node_without_the_package_gets_it_over_the_connection(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow link: what the node has not taken yet is not copied for it."""
    nowhere = {"root": "/nowhere", "version": __version__, "file": [], "wheel": ""}
    monkeypatch.setattr(package, "identity", lambda: nowhere)
    most, send = 0, Connection.send

    def counted(connection: Connection, data: bytes) -> None:
        nonlocal most
        send(connection, data)
        most = max(most, len(connection._unsent))

    monkeypatch.setattr(Connection, "send", counted)
    python = str(Path(sys.executable).resolve())
    start = replace(START, python=python, env={**START.env, "HOME": str(tmp_path), "PYTHONPATH": ""})
    launcher.node(starts=(start,))
    connected = launcher.get()
    assert isinstance(connected, NodeFacts), connected
    assert connected.sent
    assert most <= io_thread.READ_BYTES
    launcher.handle.end_input()
    events = [launcher.get() for _ in range(3)]
    assert events[1:] == [AgentEnded(), ChannelClosed()]
    assert len(list((tmp_path / ".local/state/ddplaunch/packages").glob("[0-9a-f]*"))) == 1


def test_a_node_that_is_numbered_otherwise_has_its_tag_all_the_same(launcher: Launcher) -> None:
    """Of two nodes the first has this number: the shell takes its tag, and the process starts anew."""
    other = replace(START, env={"DDPLAUNCH_RUN_ID": "tag.6"})
    launcher.node(starts=[other, START])
    connected = launcher.get()
    assert isinstance(connected, NodeFacts)
    environ = Path(f"/proc/{connected.pid}/environ").read_bytes().split(b"\0")
    assert [each for each in environ if each.startswith(b"DDPLAUNCH_RUN_ID")] == [b"DDPLAUNCH_RUN_ID=tag.7"]


def test_the_secret_is_in_no_environment_and_no_command_line(launcher: Launcher) -> None:
    launcher.node()
    connected = launcher.get()
    assert isinstance(connected, NodeFacts)
    for name in ("environ", "cmdline"):
        assert launcher.server.secret.encode() not in Path(f"/proc/{connected.pid}/{name}").read_bytes()


def test_strangers_who_say_nothing_or_rubbish_are_in_nobodys_way(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_back, "_STRANGER_S", 2.0)
    silent = launcher.connect()
    for rubbish in (
        b"\0" * 5000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"records n7 x\n",
        b"\xff\xfe\n",
        b"a b c d e\n",
        b"x" * 2000,
    ):
        stranger = launcher.connect()
        stranger.sendall(rubbish)
        assert is_closed(stranger), rubbish
        stranger.close()
    works(launcher)
    began = time.monotonic()
    assert is_closed(silent)
    assert time.monotonic() - began < 20
    silent.close()


def test_a_thousand_strangers_at_once_delay_no_node(launcher: Launcher) -> None:
    limits.raise_open_files(4096)
    strangers = [launcher.connect() for _ in range(1000)]
    try:
        works(launcher)
        assert len(launcher.server._strangers) <= 300
    finally:
        for stranger in strangers:
            stranger.close()
    wait_until(lambda: not launcher.server._strangers, WAIT_S)


def test_what_a_node_has_said_is_worth_nothing_a_second_time(launcher: Launcher) -> None:
    """A relay that hears all, and says it again."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        heard = []
        node = launcher.node(port=relay.getsockname()[1])
        for kind in ("errors", "records"):
            inner, outer = relay.accept()[0], launcher.connect()
            with inner, outer:
                inner.sendall(outer.recv(1 << 16))
                heard.append(inner.recv(1 << 16))
                assert heard[-1].startswith(kind.encode())
                if kind == "errors":
                    outer.sendall(heard[-1])
                    inner.sendall(outer.recv(1 << 16))
        node.kill()
    for hello in heard:
        stranger = launcher.connect()
        stranger.sendall(hello)
        assert is_closed(stranger)
        stranger.close()
    works(launcher)


def test_a_node_takes_no_orders_from_another_program_at_that_port(launcher: Launcher) -> None:
    """It sends back what it gets, or a digest with another secret; the node gives up."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        node = launcher.node(port=impostor.getsockname()[1])
        for answer in ("echo", "wrong"):
            connection = impostor.accept()[0]
            with connection:
                connection.sendall(b"ddplaunch " + b"0" * 64 + b"\n")
                proof = connection.recv(1 << 16).split()[-1]
                wrong = hmac.digest(b"", b"", "sha256").hex().encode()
                connection.sendall((proof if answer == "echo" else wrong) + b" tag.7\n")
                assert connection.recv(1) == b"", answer
        node.kill()


def test_a_node_that_does_not_know_the_secret_says_so_and_another_one_works(launcher: Launcher) -> None:
    start = RemoteStart(python=sys.executable, cwd="/", timeout_s=2.0)
    text = caller.first_input([start], "NODE", "NUMBER") + caller.credentials("none", launcher.server.port, "127.0.0.1")
    env = {**os.environ, "NODE": "n7"}
    done = subprocess.run(
        ["/bin/sh", "-c", remote_start.COMMAND], input=text, capture_output=True, env=env, check=False
    )
    assert done.returncode == 1
    facts = json.loads(done.stdout.splitlines()[-1].removeprefix(remote_start.FACTS_PREFIX))
    assert facts["error"] == f"127.0.0.1:{launcher.server.port} (the connection was closed)"
    works(launcher)


def test_a_name_that_is_not_expected_is_not_let_in(launcher: Launcher) -> None:
    launcher.node("n8")
    works(launcher)


def test_records_both_ways_in_their_order_also_large_ones(launcher: Launcher) -> None:
    """An agent that answers each ping; here it is a shell that sends back what it reads."""
    mine, theirs = socket.socketpair()
    script = b"cat"

    def connect() -> None:
        launcher.handle.on_records_connected(Connection(launcher.io, mine, lambda _: None, lambda: None))

    launcher.io.call(connect)
    echo = subprocess.Popen(["/bin/sh", "-c", script], stdin=theirs, stdout=theirs)
    theirs.sendall(b"printed before\n" + remote_start.FACTS_PREFIX + FACTS + b"\n")
    theirs.close()
    assert isinstance(launcher.get(), NodeFacts)
    sent: list[object] = [Pong(float(number)) for number in range(5000)]
    for record in sent:
        launcher.handle.send(record)
    launcher.handle.end_input()
    assert [launcher.get() for _ in sent] == sent
    assert launcher.get() == ChannelClosed()
    assert echo.wait(WAIT_S) == 0


def test_an_invalid_record_ends_only_its_agent(launcher: Launcher) -> None:
    launcher.node()
    assert isinstance(launcher.get(), NodeFacts)
    launcher.io.call(lambda: launcher.handle._on_data(b'{"record": "Nothing"}\n'))
    assert "sent an invalid record and was given up" in str(launcher.get())
    assert launcher.get() == ChannelClosed()


def test_the_last_words_of_an_agent_come_before_its_end(launcher: Launcher) -> None:
    (records, agent), (errors, stderr) = socket.socketpair(), socket.socketpair()

    def connect() -> None:
        launcher.handle.on_errors_connected(Connection(launcher.io, errors, lambda _: None, lambda: None))
        launcher.handle.on_records_connected(Connection(launcher.io, records, lambda _: None, lambda: None))

    with agent, stderr:
        agent.sendall(remote_start.FACTS_PREFIX + FACTS + b"\n")
        launcher.io.call(connect)
        assert isinstance(launcher.get(), NodeFacts)
        stderr.sendall(b"Fatal Python error\n")
    assert [launcher.get(), launcher.get()] == [Notice("node7: Fatal Python error"), ChannelClosed()]


def test_a_node_that_ends_before_its_agent_starts_is_a_failure(launcher: Launcher) -> None:
    mine, theirs = socket.socketpair()

    def connect() -> None:
        launcher.handle.on_records_connected(Connection(launcher.io, mine, lambda _: None, lambda: None))

    launcher.io.call(connect)
    theirs.sendall(b"no such interpreter\n")
    theirs.close()
    failure = launcher.get()
    assert isinstance(failure, HostFailure)
    assert failure.message == "the node did not start the agent: no such interpreter"
