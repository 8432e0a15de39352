"""How long many nodes need to agree on a round: 256 members on this machine, beside torchrun's c10d rendezvous.

Both sides' processes are forked after the import of torch and then let go all at once; what counts is the time until
the last one knows its rank. Sockets stand for our agents, whose part in it this process plays.
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
from common import alternate, check_hosts, compared, print_table
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ddplaunch import protocol
from ddplaunch.rendezvous import member
from ddplaunch.rounds import FROM_MEMBER, ListenForStore, MemberReady, MemberSpec, NodeJoined, RoundFormed, StoreListens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODES = int(os.environ.get("BENCH_NODES", "256"))
REPEATS = int(os.environ.get("BENCH_REPEATS", "3"))
GIVE_UP_S = 45.0


@contextlib.contextmanager
def forked(count: int, body: Callable[[int, socket.socket], None]) -> Iterator[list[socket.socket]]:
    """So many processes that each run ``body(number, channel)`` as soon as their channel brings a byte."""
    pids, channels = [], []
    try:
        for number in range(count):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                try:
                    for channel in (*channels, ours):
                        channel.close()
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # All complain when the one that serves ends.
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
    """Those of ``poller`` that have something to say, for ``GIVE_UP_S``."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        yield from (fd for fd, _ in poller.poll(1.0))


def watching(channels: list[socket.socket]) -> select.epoll:
    poller = select.epoll()
    for channel in channels:
        poller.register(channel, select.EPOLLIN)
    return poller


# Ours.


def ddplaunch_s() -> float:
    """Infinite if they have not met in ``GIVE_UP_S``."""
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
                if agents[fd].has_met():
                    del agents[fd]
                if not agents:
                    return time.perf_counter() - started
    return float("inf")


class Agent:
    """What an agent says to its member, as far as the first round goes."""

    def __init__(self, number: int, channel: socket.socket) -> None:
        self._number = number
        self._channel = channel
        self._half_line = b""

    def begin(self, port: int) -> None:
        spec = MemberSpec(
            token="bench",
            node_id=str(self._number),
            node_index=self._number,
            hosts=("127.0.0.1",),
            port=port,
            serves=self._number == 0,
            min_nodes=NODES,
            max_nodes=NODES,
            max_restarts=0,
            connect_timeout_s=GIVE_UP_S,
            last_call_s=0.0,
            lost_after_s=30.0,
            silence_s=GIVE_UP_S,
            seats=tuple(range(NODES)) if self._number == 0 else (),
        )
        self._channel.send(b"!")
        self._say(spec)

    def has_met(self) -> bool:
        """Take what has come, and answer; whether it was the round."""
        data = self._channel.recv(1 << 16)
        if not data:
            sys.exit(f"member {self._number} has ended")
        *lines, self._half_line = (self._half_line + data).split(b"\n")
        records = [protocol.decode(line, FROM_MEMBER) for line in lines]
        for record in records:
            match record:
                case MemberReady(reached=reached):
                    self._say(NodeJoined(self._number, f"node{self._number}", 8, reached))
                case ListenForStore(attempt=attempt):
                    self._say(StoreListens(attempt, "127.0.0.1", 1234))
        return any(isinstance(record, RoundFormed) for record in records)

    def _say(self, record: object) -> None:
        self._channel.sendall(protocol.encode(record))


# torchrun's.


def torchrun_s() -> float:
    """Likewise: whoever finds that another one was quicker tries again a second later."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def body(number: int, channel: socket.socket) -> None:
        random.seed()  # Else all would wait equally long, where each waits a little so as not to come all at once.
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
                sys.exit("torchrun's nodes have not met")
            poller.unregister(fd)
            if not waiting:
                return time.perf_counter() - started
    return float("inf")


def main() -> None:
    check_hosts()
    times = alternate(torchrun_s, ddplaunch_s, repeats=REPEATS)
    print_table("rendezvous", [compared(f"{NODES} nodes meet, torch imported before", *times)])


if __name__ == "__main__":
    main()
