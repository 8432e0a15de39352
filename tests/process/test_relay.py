"""Agents that connect to a launcher by encrypted connections: its port, and the relay on the node."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig
from ddplaunch.features.remote import call_back, relay, remote_start
from ddplaunch.features.remote.call_back import CallBackHandle
from ddplaunch.features.remote.io_thread import IoThread
from ddplaunch.features.remote.remote_start import RemoteStart
from ddplaunch.features.ssh.listener import AgentListener
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Pong
from ddplaunch.system import limits
from ddplaunch.transport.handle import ChannelClosed, NodeFacts, discard_output
from ddplaunch.version import __version__
from tests.support.processes import wait_until

WAIT_S = 30.0
MANY_BYTES = 20_000_000
MOST_IN_TRANSIT = 4_000_000


class Relayed:
    """A relay, the launcher's ends of its connections, and the process that is its agent."""

    def __init__(self, script: str) -> None:
        agent_streams, streams = socket.socketpair()
        agent_stderr, stderr = socket.socketpair()
        self.records, records = socket.socketpair()
        self.errors, errors = socket.socketpair()
        self.io = IoThread("test")
        with agent_streams, agent_stderr:
            command = ["/bin/sh", "-c", script]
            self.agent = subprocess.Popen(command, stdin=agent_streams, stdout=agent_streams, stderr=agent_stderr)
        self.relay = relay.Relay(self.io, self.agent.pid)
        has_begun = threading.Event()
        self.io.call(lambda: self.relay.begin(streams, stderr, records, errors))
        self.io.call(has_begun.set)
        assert has_begun.wait(WAIT_S)
        for mine in (self.records, self.errors):
            mine.settimeout(WAIT_S)

    def order(self, text: str) -> None:
        self.errors.sendall(f"{text}\n".encode())

    def exited(self) -> None:
        """What the relay's own process does: it waits for the agent."""
        os.waitid(os.P_PID, self.agent.pid, os.WEXITED | os.WNOWAIT)
        self.io.call(self.relay.on_exited)

    def close(self) -> None:
        for mine in (self.records, self.errors):
            mine.close()
        with contextlib.suppress(ProcessLookupError):
            if not self.relay.is_over.is_set():
                os.kill(self.agent.pid, 9)
        for own in (self.relay._agent, self.relay._stderr, self.relay._records, self.relay._errors):
            self.io.call(own.close)
        self.io.close()
        self.agent.returncode = 0  # The relay has waited for it.


@contextlib.contextmanager
def relayed(script: str) -> Iterator[Relayed]:
    with contextlib.closing(Relayed(script)) as it:
        yield it


def rest_of(connection: socket.socket) -> bytes:
    """All until the end."""
    data = b""
    while more := connection.recv(1 << 16):
        data += more
    return data


@pytest.mark.parametrize("order_comes", ["before", "in between", "behind"])
def test_the_input_ends_behind_as_many_bytes_as_the_launcher_has_said(order_comes: str) -> None:
    with relayed("cat; echo end >&2; exit 3") as it:
        if order_comes == "before":
            it.order("end 10")
            wait_until(lambda: it.relay._input_bytes == 10)
        it.records.sendall(b"12345")
        assert it.records.recv(5) == b"12345"
        if order_comes == "in between":
            it.order("end 10")
        it.records.sendall(b"67890")
        if order_comes == "behind":
            it.order("end 10")
        it.exited()
        assert rest_of(it.records) == b"67890"
        assert rest_of(it.errors) == b"end\n" + f"{relay.EXITED}3\n".encode()
        it.records.close()
        assert it.relay.is_over.wait(WAIT_S)


def test_what_an_agent_has_said_just_before_its_end_arrives_and_then_its_signal() -> None:
    with relayed(f"head -c {MANY_BYTES} /dev/zero; kill -9 $$") as it:
        length = 0
        while length < MANY_BYTES:
            length += len(it.records.recv(1 << 16))
        it.exited()
        assert rest_of(it.records) == b""
        assert rest_of(it.errors) == f"{relay.EXITED}-9\n".encode()


def sent_until_full(connection: socket.socket) -> int:
    """Bytes that the other side, and all in between, take."""
    connection.settimeout(1.0)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < MANY_BYTES:
            sent += connection.send(b"x" * 65536)
    connection.settimeout(WAIT_S)
    return sent


def test_an_agent_that_does_not_read_holds_up_its_launcher_and_not_the_memory_of_the_relay() -> None:
    with relayed("read line; wc -c") as it:
        os.kill(it.agent.pid, 19)
        sent = sent_until_full(it.records)
        assert sent < MOST_IN_TRANSIT
        it.order("continue")
        it.records.sendall(b"\n" + b"y" * 1000)
        it.order(f"end {sent + 1001}")
        assert rest_of_line(it.records) == b"1000"


def rest_of_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        data += connection.recv(1)
    return data.strip()


def test_a_launcher_that_does_not_read_holds_up_its_agent() -> None:
    with relayed(f"head -c {MANY_BYTES} /dev/zero; echo written >&2; read line") as it:
        wait_until(lambda: it.relay._records.waits)
        assert len(it.relay._records._unsent) < MOST_IN_TRANSIT
        length = 0
        while length < MANY_BYTES:
            length += len(it.records.recv(1 << 16))
        assert rest_of_line(it.errors) == b"written"


def test_without_the_launcher_the_input_ends_and_the_relay_waits_for_nobody() -> None:
    with relayed("cat; head -c 3000000 /dev/zero; exit 0") as it:
        it.records.close()
        it.exited()
        assert it.relay.is_over.wait(5)


class Port:
    """Where a launcher listens for the agent of one node, which has the name ``7``."""

    def __init__(self) -> None:
        self.io = IoThread("test")
        self.listener = AgentListener(
            self.io, LaunchConfig(script="x.py", hosts=(Host("node7"),), local_addr="127.0.0.1")
        )
        self.posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        start = RemoteStart(python=sys.executable, cwd="/", needs_torch=False)
        self.handle = CallBackHandle(self.io, "node7", start, self.posted.put, discard_output)
        self.listener.expect("7", self.handle)
        self.given = json.loads(self.listener.given("7"))

    def close(self) -> None:
        self.handle.close()
        self.io.close()
        self.listener.close()

    def stranger(self) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self.given["port"]))
        connected.settimeout(WAIT_S)
        return connected

    def cpu_s(self) -> float:
        """CPU time of the thread that serves all nodes."""
        times: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.io.call(lambda: times.put(time.thread_time()))
        return times.get(timeout=WAIT_S)


def is_closed(connection: socket.socket) -> bool:
    """Whether the launcher closes the connection."""
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass
    return True


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.closing(Port()) as port:
        yield port


def works(port: Port) -> None:
    """A node connects, and its agent answers."""
    with relay._connect("127.0.0.1", port.given, relay.ERRORS) as errors:
        with relay._connect("127.0.0.1", port.given, relay.RECORDS) as records:
            facts = json.dumps({"pid": 7, "python": "3.11.0", "ddplaunch": __version__})
            records.sendall(remote_start.FACTS_PREFIX + facts.encode() + b"\n" + wire.encode(Pong(1.0)))
            assert isinstance(port.posted.get(timeout=WAIT_S), NodeFacts)
            assert port.posted.get(timeout=WAIT_S) == Pong(1.0)
        assert port.posted.get(timeout=WAIT_S) == ChannelClosed()
        assert errors.recv(10) == b""


CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(60)


@pytest.mark.parametrize("said", [b"", CLIENT_HELLO], ids=["nothing", "half a greeting"])
def test_a_stranger_who_says_too_little_is_in_nobodys_way(
    port: Port, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(call_back, "_STRANGER_S", 2.0)
    with port.stranger() as stranger:
        stranger.sendall(said)
        before_s = port.cpu_s()
        works(port)
        assert is_closed(stranger)
        assert port.cpu_s() - before_s < 0.5, "the thread does not turn in circles meanwhile"


@pytest.mark.parametrize("rubbish", [bytes(5000), b"GET / HTTP/1.1\r\n\r\n", b"errors 7 x y\n", CLIENT_HELLO * 9])
def test_a_stranger_who_talks_otherwise_is_closed_at_once(port: Port, rubbish: bytes) -> None:
    with port.stranger() as stranger:
        stranger.sendall(rubbish)
        assert is_closed(stranger)
    works(port)


@pytest.mark.parametrize("wrong", [{"secret": "x" * 64}, {"name": "8"}, {"name": "7\nx"}])
def test_who_has_the_certificate_only_is_not_let_in(port: Port, wrong: dict[str, str]) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        relay._connect("127.0.0.1", {**port.given, **wrong}, relay.RECORDS)
    works(port)


def test_a_second_one_who_knows_all_does_not_replace_the_first(port: Port) -> None:
    with relay._connect("127.0.0.1", port.given, relay.RECORDS) as records:
        with pytest.raises(OSError, match=r"closed|reset"):
            relay._connect("127.0.0.1", port.given, relay.RECORDS)
        facts = json.dumps({"pid": 7, "python": "3.11.0", "ddplaunch": __version__})
        records.sendall(remote_start.FACTS_PREFIX + facts.encode() + b"\n")
        assert isinstance(port.posted.get(timeout=WAIT_S), NodeFacts)


def test_a_thousand_strangers_delay_no_node(port: Port) -> None:
    limits.raise_open_files(4096)
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            stack.enter_context(port.stranger()).sendall(CLIENT_HELLO if number % 2 else b"")
        works(port)


def test_a_firewall_does_not_forget_a_connection_that_says_nothing(port: Port) -> None:
    with relay._connect("127.0.0.1", port.given, relay.ERRORS) as errors:
        assert errors.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert errors.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 300
