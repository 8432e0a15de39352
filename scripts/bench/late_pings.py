"""The longest time without a ping, as large jobs hang, restart and fail: the real launcher, simulated agents.

The agents are in another process; each has a connection and two threads in the launcher, as over srun, and 8 ranks
with two process groups of the whole job. Phases: all agents start; the job is quiet, is examined and reported; all
ranks fail, the first time with a restart. The launcher's main thread may be busy meanwhile, but the pings must not
wait: the aim is 1.1 s between two of them, on a machine without other load.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import queue
import selectors
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import size
from scale import WORKERS, host_name, worker_exit

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, OutputConfig, WorkerConfig
from ddplaunch.features.hangs.records import (
    CollectiveCall,
    FlightRecord,
    PendingCall,
    ProcessGroup,
    RankEvidence,
    WorkerActivity,
    WorkersExamined,
)
from ddplaunch.features.remote import remote_start
from ddplaunch.launcher import launch, run, setup
from ddplaunch.launcher.display.console import Console
from ddplaunch.mailbox import K, Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import (
    AgentEnded,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    Ping,
    Pong,
)
from ddplaunch.protocol.results import AttemptResult, WorkerError
from ddplaunch.transport.handle import AgentConnected, AgentHandle, ChannelClosed, FromNode, discard_output, post_as

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = size("BENCH_NODES", (64, 256), (4,))
PHASES = ("start", "hang", "restart", "end")
BEATS = size("BENCH_BEATS", 3, 1)
STACK = 60 * '  File "/usr/lib/python3/site-packages/torch/nn/modules/module.py", line 1751 in _wrapped_call_impl\n'
CALLS = 64


# The agents, in a process of their own.


def evidence(rank: int, groups: tuple[ProcessGroup, ...]) -> RankEvidence:
    """What is known of a rank that waits for rank 1; rank 1 sleeps."""
    last = CALLS if rank == 1 else CALLS + 1
    calls = tuple(
        CollectiveCall(group=groups[number % 2].name, number=number // 2 + 1, operation="all_reduce", backend="nccl",
                       input_sizes=((4096, 1024),), output_sizes=((4096, 1024),), dtypes=("Float",),
                       is_done=number < CALLS, created_ns=1_790_000_000_000_000_000 + number)
        for number in range(last)
    )  # fmt: skip
    return RankEvidence(
        rank=rank, local_rank=rank % WORKERS, host=host_name(rank // WORKERS), pid=1000 + rank, silent_s=400.0,
        window_s=2.0, where="train.py:6 in step", stack_is_same=True, stacks=STACK, collectives_moved=False,
        pending=None if rank == 1 else PendingCall("all_reduce"),
        flight_record=FlightRecord(groups=groups, calls=calls),
    )  # fmt: skip


class Agents:
    """All simulated agents; ``run`` leads the job through its phases."""

    def __init__(self, channels: list[socket.socket], folder: Path, began: dict[str, float]) -> None:
        """``began`` gets the ``time.monotonic()`` of the begin of each phase."""
        self._channels, self._folder, self._began, self._count = channels, folder, began, len(channels)
        self._selector = selectors.DefaultSelector()
        self._unread = [b""] * self._count
        self._outgoing: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in channels]
        for index, channel in enumerate(channels):
            self._selector.register(channel, selectors.EVENT_READ, index)
            threading.Thread(target=self._write, args=(index,), daemon=True).start()
        self._pings = self._joined = self._examination = 0
        everyone = f"0-{self._count * WORKERS - 1}"
        self._groups = (ProcessGroup("0", "default_pg", everyone), ProcessGroup("1", "fsdp", everyone))

    def run(self, is_ready: Callable[[], None]) -> None:
        evidences = [self._evidence(node) for node in range(self._count)]
        results = [[self._result(node, attempt, evidences[node]) for attempt in (0, 1)] for node in range(self._count)]
        ready = [wire.encode(WorkersExamined(0, 1, each)) for each in evidences]
        is_ready()
        self._begin("start", lambda: self._joined == self._count)
        self._start(0)
        self._wait_beats()
        self._begin("hang", lambda: self._examination > 0, WorkerActivity(0, 400.0, 400.0))
        self._send_each(ready.__getitem__)
        self._wait(lambda: (self._folder / "hang.txt").exists())
        self._wait_beats()
        self._began["restart"] = time.monotonic()
        self._send_each(lambda node: results[node][0])
        self._start(1)
        self._wait_beats()
        self._began["end"] = time.monotonic()
        self._send_each(lambda node: results[node][1])
        self._wait_beats()
        self._send_each(lambda _: wire.encode(AgentEnded()))
        self._send_each(lambda _: b"")
        self._wait(lambda: not self._selector.get_map())

    def _evidence(self, node: int) -> tuple[RankEvidence, ...]:
        return tuple(evidence(node * WORKERS + local, self._groups) for local in range(WORKERS))

    def _result(self, node: int, attempt: int, known: tuple[RankEvidence, ...]) -> bytes:
        lost = WorkerError("RuntimeError: Connection closed by peer", "Traceback\n" + STACK, time.time())
        exits = tuple(worker_exit(node, local, error=lost) for local in range(WORKERS))
        result = AttemptResult(attempt, "failed", exits, 60.0, attempt_follows=not attempt, restart_count=attempt)
        return wire.encode(AttemptEnded(result, (WorkersExamined(attempt, 0, known),)))

    def _begin(self, phase: str, is_over: Callable[[], bool], *records: object) -> None:
        self._began[phase] = time.monotonic()
        for line in map(wire.encode, records):
            for queued in self._outgoing:
                queued.put(line)
        self._wait(is_over)

    def _start(self, attempt: int) -> None:
        pids = tuple(range(WORKERS))
        self._send_each(
            lambda n: wire.encode(AttemptStarted(attempt, self._count * WORKERS, pids, n, self._count, n * WORKERS))
        )

    def _wait_beats(self) -> None:
        wanted = self._pings + BEATS * self._count
        self._wait(lambda: self._pings >= wanted)

    def _send_each(self, line_of: Callable[[int], bytes]) -> None:
        for index, queued in enumerate(self._outgoing):
            queued.put(line_of(index))

    def _write(self, index: int) -> None:
        """In a thread of each agent: large records must not delay the answers of others."""
        while line := self._outgoing[index].get():
            self._channels[index].sendall(line)
        self._channels[index].shutdown(socket.SHUT_WR)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            for key, _ in self._selector.select(0.01):
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not data:
                    self._selector.unregister(key.fileobj)
                *lines, self._unread[key.data] = (self._unread[key.data] + data).split(b"\n")
                for line in lines:
                    self._answer(key.data, json.loads(line))

    def _answer(self, index: int, record: dict[str, Any]) -> None:
        match record:
            case {"record": "AgentSpec"}:
                self._send(index, AgentReady(WORKERS))
            case {"record": "Ping", "time_s": sent_s}:
                self._pings += 1
                self._send(index, Pong(sent_s, time.time()))
            case {"record": "JoinRendezvous", "rendezvous": settings}:
                if settings["is_server"]:
                    self._send(index, EndpointOpen(settings["token"], ("10.0.0.1",), 4321))
                self._joined += 1
            case {"record": "ExamineWorkers", "number": number}:
                self._examination = number

    def _send(self, index: int, record: object) -> None:
        self._outgoing[index].put(wire.encode(record))


# The launcher.


class Handle(AgentHandle):
    """The handle of a simulated agent; keeps when its pings were sent."""

    def __init__(self, index: int, channel: socket.socket, post: Callable[[object], None]) -> None:
        super().__init__(f"on {host_name(index)}", post_as(FromNode, index, post), discard_output)
        self._channel, self.pinged_at = channel, list[float]()
        facts = {"pid": 1, "python": "3.11.0", "ddplaunch": "0.1", "torch": "2.13"}
        self._post(AgentConnected(remote_start.read_facts(remote_start.FACTS_PREFIX + json.dumps(facts).encode())))
        for target in (self._send, self._receive):
            threading.Thread(target=target, daemon=True).start()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (record := self._outgoing.get()) is not None:
                self._channel.sendall(wire.encode(record))
                if isinstance(record, Ping):
                    self.pinged_at.append(time.monotonic())

    def _receive(self) -> None:
        with self._channel.makefile("rb") as stream:
            self._deliver_records(stream)
        self._post(ChannelClosed())

    def wake(self) -> None: ...

    def kill(self) -> None: ...

    def end_input(self) -> None:
        super().end_input()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self, timeout_s: float = 5.0) -> int:
        return 0


class Transport:
    """The transport to the simulated agents."""

    is_remote = True

    def __init__(self, hosts: tuple[Host, ...], channels: list[socket.socket], post: Callable[[object], None]) -> None:
        self.node_names = tuple(map(str, hosts))
        self.handles: list[Handle] = []
        self._channels, self._post = channels, post

    def start(self, index: int) -> Handle:
        self.handles.append(Handle(index, self._channels[index], self._post))
        return self.handles[-1]

    def close(self) -> None: ...


class WatchedMailbox(Mailbox[object]):
    """Keeps when the main thread has looked for events, or only for signals: between, it was busy."""

    def __init__(self) -> None:
        super().__init__()
        self.busy: list[tuple[float, float]] = []
        self._left_at = time.monotonic()

    def get(self, deadline: float = float("inf")) -> object:
        self._look()
        event = super().get(deadline)
        self._left_at = time.monotonic()
        return event

    def take(self, kind: type[K]) -> list[K]:
        self._look()
        return super().take(kind)

    def _look(self) -> None:
        now = time.monotonic()
        self.busy.append((self._left_at, now))
        self._left_at = now


@contextlib.contextmanager
def agents(count: int, folder: Path, began: dict[str, float]) -> Iterator[list[socket.socket]]:
    """The launcher's ends of the connections to ``count`` agents, which run until the end of their job."""
    pairs = [socket.socketpair() for _ in range(count)]
    ours, theirs = ([pair[end] for pair in pairs] for end in (0, 1))
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def serve() -> None:
        for channel in ours:
            channel.close()
        Agents(theirs, folder, began).run(ready.set)

    process = context.Process(target=serve)
    process.start()
    for channel in theirs:
        channel.close()
    try:
        ready.wait()
        yield ours
    finally:
        process.terminate()
        process.join()


def longest(times: list[tuple[float, float]], begin: float, end: float) -> float:
    """The longest of these times of which a part lies between ``begin`` and ``end``."""
    return max((until - since for since, until in times if until > begin and since < end), default=0.0)


def measure(count: int) -> list[tuple[str, float, float]]:
    """Of each phase: the longest time between two pings of a node, and for which the main thread was busy."""
    with (
        multiprocessing.Manager() as manager,
        tempfile.TemporaryDirectory() as name,
        open(os.devnull, "w") as null,
        agents(count, folder := Path(name), began := manager.dict()) as channels,  # type: ignore[arg-type]
    ):
        hosts, mailbox = tuple(Host(host_name(n)) for n in range(count)), WatchedMailbox()
        transport = Transport(hosts, channels, mailbox.post)
        setup.transport_for = lambda *_: transport  # type: ignore[assignment, return-value]
        workers, output = WorkerConfig(nproc_per_node=WORKERS), OutputConfig(log_dir=name, page=False)
        config = LaunchConfig(
            script="train.py", hosts=hosts, min_nodes=count, max_nodes=count, workers=workers, output=output,
            max_restarts=1,
        )  # fmt: skip
        style = setup.console_style(config, folder, null.fileno())
        with (
            launch.without_full_collections(),
            contextlib.closing(Console(style, null.fileno(), null.fileno())) as console,
        ):
            result = run.Run(config, "pings", "pings", None, mailbox, folder, console).run()
        assert len(result.attempts) == 2, result
        return rows(dict(began), transport.handles, mailbox.busy)


def rows(
    began: dict[str, float], handles: list[Handle], busy: list[tuple[float, float]]
) -> list[tuple[str, float, float]]:
    """The figures of each phase; the last one ends with the last ping."""
    ends = [*(began[phase] for phase in PHASES[1:]), max(handle.pinged_at[-1] for handle in handles)]
    gaps = [gap for handle in handles for gap in zip(handle.pinged_at, handle.pinged_at[1:], strict=False)]
    return [
        (phase, longest(gaps, began[phase], end), longest(busy, began[phase], end))
        for phase, end in zip(PHASES, ends, strict=True)
    ]


def main() -> None:
    print(f"{os.cpu_count()} cores, {platform.machine()}, {time.strftime('%Y-%m-%d')}; {WORKERS} workers a node\n")
    print("| nodes | phase | longest time without a ping | main thread busy for |\n|---|---|---|---|")
    for count in SIZES:
        for phase, gap_s, busy_s in measure(count):
            print(f"| {count:,} | {phase} | {gap_s:.3f} s | {busy_s:.3f} s |", flush=True)


if __name__ == "__main__":
    main()
