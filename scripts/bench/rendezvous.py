"""Time of a rendezvous of 256 nodes on this machine, compared with torchrun's c10d rendezvous.

The processes of both are forked after the import of torch and start at one time; measured is the time until the last
one has its rank. For ddplaunch this process plays all agents, over a socket to each member.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import torch.distributed.elastic.rendezvous.registry as registry
from common import alternate, check_hosts, compared, print_table, size
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ddplaunch.config import RendezvousConfig
from ddplaunch.protocol import wire
from ddplaunch.protocol.rendezvous import (
    FROM_MEMBER,
    ListenForWorkersStore,
    MemberReady,
    MemberSpec,
    NodeJoined,
    RoundFormed,
    WorkersStoreListens,
)
from ddplaunch.rendezvous import member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODES = size("BENCH_NODES", 256, 2)
REPEATS = size("BENCH_REPEATS", 3, 1)
GIVE_UP_S = 45.0


@contextlib.contextmanager
def forked(count: int, body: Callable[[int, socket.socket], None]) -> Iterator[list[socket.socket]]:
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
        yield channels
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
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        port = listener.getsockname()[1]

        def body(number: int, channel: socket.socket) -> None:
            member.serve(channel.detach(), listener.fileno() if number == 0 else -1)

        with forked(NODES, body) as channels:
            agents = {channel.fileno(): Agent(number, channel) for number, channel in enumerate(channels)}
            poller = watching(channels)
            started = time.perf_counter()
            for agent in agents.values():
                agent.begin(port)
            for fd in readable(poller):
                if agents[fd].has_round():
                    del agents[fd]
                if not agents:
                    return time.perf_counter() - started
    return float("inf")


class Agent:
    """An agent's side of the channel to its member, up to the first round."""

    def __init__(self, number: int, channel: socket.socket) -> None:
        self._number = number
        self._channel = channel
        self._half_line = b""

    def begin(self, port: int) -> None:
        spec = MemberSpec(
            rendezvous=RendezvousConfig(
                token="bench",
                min_nodes=NODES,
                max_nodes=NODES,
                node_index=self._number,
                server_addresses=("127.0.0.1",),
                port=port,
                is_server=self._number == 0,
                local_addr=None,
                interface=None,
                join_timeout_s=GIVE_UP_S,
                last_call_timeout_s=0.0,
                silent_after_s=30.0,
                assigned=tuple(range(NODES)) if self._number == 0 else (),
                secret="sixteen letters!",
            ),
            node_id=str(self._number),
            run_id="bench",
            max_restarts=0,
            one_launcher_leads=True,
        )
        self._channel.send(b"!")
        self._send(spec)

    def has_round(self) -> bool:
        """Read and answer the member's records. Returns whether the round has formed."""
        data = self._channel.recv(1 << 16)
        if not data:
            sys.exit(f"member {self._number} has ended")
        *lines, self._half_line = (self._half_line + data).split(b"\n")
        records = [wire.decode(line, FROM_MEMBER) for line in lines]
        for record in records:
            match record:
                case MemberReady(server_address=server_address):
                    self._send(NodeJoined(self._number, f"node{self._number}", 8, server_address))
                case ListenForWorkersStore(attempt=attempt):
                    self._send(WorkersStoreListens(self._number, attempt, "127.0.0.1", 1234))
        return any(isinstance(record, RoundFormed) for record in records)

    def _send(self, record: object) -> None:
        self._channel.sendall(wire.encode(record))


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

    with forked(NODES, body) as channels:
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
    times = alternate(torchrun_s, ddplaunch_s, repeats=REPEATS)
    print_table("rendezvous", [compared(f"{NODES} nodes: rendezvous, torch already imported", *times)])


if __name__ == "__main__":
    main()
