"""Time of a rendezvous of 256 nodes on this machine, compared with torchrun's c10d rendezvous; CPU of 4,096 nodes.

The processes of both are forked after the import of torch and start at one time; measured is the time until the last
one has its rank. For ddplaunch this process plays all agents, over a socket to each member.

For larger jobs it also plays the members of all nodes but the first, with two connections each to its real store, as
members have: they meet, send heartbeats, lose a node, and meet again. Measured is the CPU time of the first node's
member, which serves the store and decides for all.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed.elastic.rendezvous.registry as registry
from common import alternate, check_hosts, compared, print_table, size
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ddplaunch.config import RendezvousConfig
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import AssignNodes
from ddplaunch.protocol.rendezvous import (
    FROM_MEMBER,
    TO_NODE,
    ListenForWorkersStore,
    MemberReady,
    MemberSpec,
    NodeReady,
    RoundFormed,
    RoundVerdict,
    StopRound,
    WorkersEnded,
    WorkersStoreListens,
)
from ddplaunch.rendezvous import member
from ddplaunch.rendezvous.boxes import send_to_coordinator
from ddplaunch.rendezvous.connect import verified
from ddplaunch.rendezvous.plain_store import PlainStore
from ddplaunch.rendezvous.store import Signer, beat_key, key_prefix, open_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODES = size("BENCH_NODES", 256, 2)
REPEATS = size("BENCH_REPEATS", 3, 1)
SIZES = size("BENCH_SIZES", (64, 256, 1024, 4096), (2, 4))
BEATS = size("BENCH_BEATS", 3, 1)
GIVE_UP_S = 45.0


@contextlib.contextmanager
def forked(count: int, body: Callable[[int, socket.socket], None]) -> Iterator[tuple[list[socket.socket], list[int]]]:
    """Fork ``count`` processes; each runs ``body(number, channel)`` after the first byte on its channel."""
    pids, channels = [], []
    try:
        for number in range(count):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                try:
                    for channel in (*channels, ours):
                        channel.close()
                    os.dup2(
                        os.open(os.devnull, os.O_WRONLY), 2
                    )  # All print errors when the process with the endpoint exits.
                    theirs.recv(1)
                    body(number, theirs)
                finally:
                    os._exit(0)
            theirs.close()
            pids.append(pid)
            channels.append(ours)
        yield channels, pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        for channel in channels:
            channel.close()


def readable(poller: select.epoll) -> Iterator[int]:
    """Descriptors of ``poller`` with data, as it arrives, for ``GIVE_UP_S`` seconds."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        yield from (fd for fd, _ in poller.poll(1.0))


def watching(channels: list[socket.socket]) -> select.epoll:
    poller = select.epoll()
    for channel in channels:
        poller.register(channel, select.EPOLLIN)
    return poller


# ddplaunch.


def ddplaunch_s() -> float:
    """Seconds until all members have a round; infinite after ``GIVE_UP_S``."""
    with members(NODES, NODES) as (port, channels, _):
        agents = {channel.fileno(): Agent(number, channel) for number, channel in enumerate(channels)}
        poller = watching(channels)
        started = time.perf_counter()
        for agent in agents.values():
            agent.begin(port, NODES)
        for fd in readable(poller):
            if agents[fd].has_round():
                del agents[fd]
            if not agents:
                return time.perf_counter() - started
    return float("inf")


@contextlib.contextmanager
def members(count: int, listening: int) -> Iterator[tuple[int, list[socket.socket], list[int]]]:
    """``count`` real members; yields the port of the first one's store, their channels, and their pids."""
    with socket.create_server(("127.0.0.1", 0), backlog=max(listening, 1024)) as listener:

        def body(number: int, channel: socket.socket) -> None:
            member.serve(channel.detach(), listener.fileno() if number == 0 else -1)

        with forked(count, body) as (channels, pids):
            yield listener.getsockname()[1], channels, pids


def spec_of(number: int, port: int, nodes: int) -> MemberSpec:
    return MemberSpec(
        rendezvous=RendezvousConfig(
            token="bench",
            min_nodes=1,
            max_nodes=nodes,
            node_index=number,
            server_addresses=("127.0.0.1",),
            port=port,
            is_server=number == 0,
            local_addr=None,
            interface=None,
            join_timeout_s=GIVE_UP_S,
            last_call_timeout_s=0.0,
            silent_after_s=300.0,
            assigned=tuple(range(nodes)) if number == 0 else (),
            secret="sixteen letters!",
        ),
        node_id=str(number),
        run_id="bench",
        max_restarts=0,
        one_launcher_leads=True,
    )


class Agent:
    """An agent's side of the channel to its member."""

    def __init__(self, number: int, channel: socket.socket) -> None:
        self._number = number
        self._channel = channel
        self._half_line = b""

    def begin(self, port: int, nodes: int) -> None:
        self._channel.send(b"!")
        self.send(spec_of(self._number, port, nodes))

    def has_round(self) -> bool:
        """Read and answer the member's records. Returns whether the round has formed."""
        data = self._channel.recv(1 << 16)
        if not data:
            sys.exit(f"member {self._number} has ended")
        *lines, self._half_line = (self._half_line + data).split(b"\n")
        records = [wire.decode(line, FROM_MEMBER) for line in lines]
        for record in records:
            for answer in answers(self._number, record):
                self.send(answer)
        return any(isinstance(record, RoundFormed) for record in records)

    def send(self, record: object) -> None:
        self._channel.sendall(wire.encode(record))


def answers(number: int, record: object) -> list[object]:
    """What an agent says to a record of the coordinator or of its member: its workers end at once."""
    match record:
        case MemberReady() | RoundVerdict(attempt_follows=True):
            return [NodeReady(number, f"node{number}", 8, "127.0.0.1")]
        case ListenForWorkersStore(attempt=attempt):
            return [WorkersStoreListens(number, attempt, "127.0.0.1", 1234)]
        case StopRound(attempt=attempt):
            return [WorkersEnded(attempt, "stopped", node_index=number)]
    return []


# More nodes, of which only the first one's member is real.

_WAIT, _GET = 6, 3


class PlayedMember:
    """The member of node ``number``: sends as a real one does; what it waits for arrives on ``outbox``."""

    def __init__(self, number: int, port: int, nodes: int) -> None:
        self.number, self._spec = number, spec_of(number, port, nodes)
        self._prefix, self._store = key_prefix(self._spec), PlainStore("127.0.0.1", port)
        secret = Signer(self._spec.rendezvous.secret)
        self._signer = verified(self._spec, secret, self._store.get(open_key(self._spec)))
        self._nonce, self._awaited, self._received = os.urandom(16).hex(), 0, b""
        self.outbox = PlainStore("127.0.0.1", port)._socket
        self._await_next()

    def send(self, record: object) -> None:
        if isinstance(record, NodeReady):
            record = replace(record, nonce=self._nonce)
        send_to_coordinator(self._store, self._signer, self._prefix, record)

    def beat(self) -> None:
        self._store.add(beat_key(self._spec, self.number), 1)

    def _await_next(self) -> None:
        self._awaited += 1
        self._key = f"{self._prefix}/to/{self.number}/{self._awaited}"
        self._text = struct.pack("=Q", len(self._key) + 1) + b"/" + self._key.encode()
        self.outbox.sendall(struct.pack("=BQ", _WAIT, 1) + self._text)

    def receive(self) -> object | None:
        """The record that is awaited, if all of it has come; the next one is then awaited."""
        if not self._received:  # The answer to the wait is a byte.
            self._received = self.outbox.recv(1)
            self.outbox.sendall(struct.pack("=B", _GET) + self._text)
            return None
        self._received += self.outbox.recv(1 << 16)
        size = struct.unpack("=Q", self._received[1:9])[0] if len(self._received) >= 9 else sys.maxsize
        if len(self._received) < 9 + size:
            return None
        line = self._signer.for_node(self._nonce).verify(self._key, self._received[9:])
        self._received = b""
        self._await_next()
        assert line
        return wire.decode(line, TO_NODE)


class Played:
    """A job of ``nodes``; ``meet`` and ``lose`` return when all nodes have the round."""

    def __init__(self, port: int, channel: socket.socket, nodes: int) -> None:
        self._first, self._nodes = Agent(0, channel), list(range(1, nodes))
        self._selector = selectors.EpollSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._first.begin(port, nodes)
        with socket.create_connection(("127.0.0.1", port)):  # Waits until the store is served.
            pass
        while not self._is_open(port, nodes):
            time.sleep(0.01)
        self._members = {number: PlayedMember(number, port, nodes) for number in self._nodes}
        for each in self._members.values():
            self._selector.register(each.outbox, selectors.EVENT_READ, each)

    @staticmethod
    def _is_open(port: int, nodes: int) -> bool:
        with PlainStore("127.0.0.1", port) as store:
            return store.check(open_key(spec_of(1, port, nodes)))

    def meet(self) -> None:
        for number, each in self._members.items():
            each.beat()
            each.send(NodeReady(number, f"node{number}", 8, "127.0.0.1"))
        self._await_round()

    def beat(self) -> None:
        """The heartbeats of ``BEATS`` seconds, at the pace of real members."""
        for _ in range(BEATS):
            began = time.monotonic()
            for each in self._members.values():
                each.beat()
            time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))

    def lose(self) -> None:
        """The last node is lost: the launcher names the others to the coordinator."""
        lost = self._members.pop(self._nodes.pop())
        self._selector.unregister(lost.outbox)
        self._first.send(AssignNodes("bench", (0, *self._nodes)))
        self._await_round()

    def _await_round(self) -> None:
        waiting = len(self._nodes) + 1
        while waiting:
            for key, _ in self._selector.select(GIVE_UP_S):
                if key.data is None:
                    waiting -= self._first.has_round()
                    continue
                record = key.data.receive()
                waiting -= isinstance(record, RoundFormed)
                for answer in answers(key.data.number, record):
                    key.data.send(answer)


def print_cpu() -> None:
    """The CPU of the first node's member, for each node, in each phase."""
    print("\n| nodes | meet | a second of heartbeats | lose a node and meet again | memory |\n|---|---|---|---|---|")
    for nodes in SIZES:
        with members(1, nodes) as (port, channels, pids):
            clock, took = (~pids[0] << 3) | 2, []  # clock_getcpuclockid(3)
            for phase, rounds in (("meet", 1), ("beat", BEATS), ("lose", 1)):
                before_s = time.clock_gettime(clock)
                if phase == "meet":
                    played = Played(port, channels[0], nodes)
                getattr(played, phase)()
                took.append((time.clock_gettime(clock) - before_s) / rounds)
            with open(f"/proc/{pids[0]}/status") as file:
                memory = next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmRSS"))
        each = " | ".join(f"{s:.3f} s, {s / nodes * 1e6:.0f} us a node" for s in took)
        print(f"| {nodes:,} | {each} | {memory} MB |", flush=True)


# torchrun.


def torchrun_s() -> float:
    """Seconds until all nodes have a rank; infinite after ``GIVE_UP_S``. A node that loses a race retries after 1 s."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def body(number: int, channel: socket.socket) -> None:
        random.seed()  # Else all processes would draw one random delay, where torch spreads them.
        parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", "bench", NODES, NODES, is_host=number == 0)
        met = registry.get_rendezvous_handler(parameters).next_rendezvous()
        channel.sendall(b"." if met.world_size == NODES else b"!")
        signal.pause()

    with forked(NODES, body) as (channels, _):
        poller, waiting = watching(channels), {channel.fileno(): channel for channel in channels}
        started = time.perf_counter()
        for channel in channels:
            channel.send(b"!")
        for fd in readable(poller):
            if waiting.pop(fd).recv(1) != b".":
                sys.exit("torchrun's rendezvous failed")
            poller.unregister(fd)
            if not waiting:
                return time.perf_counter() - started
    return float("inf")


def main() -> None:
    check_hosts()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    times = alternate(torchrun_s, ddplaunch_s, repeats=REPEATS)
    print_table("rendezvous", [compared(f"{NODES} nodes: rendezvous, torch already imported", *times)])
    print_cpu()


if __name__ == "__main__":
    main()
