"""The agents of a simulated job of thousands of nodes, for ``scale.py``: real records over TCP, in one process.

The process leads the job through its phases, and measures in each what the launcher's process uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.workers.exit_details import shorten
from ddplaunch.features.hangs.flight_record import shortened
from ddplaunch.features.hangs.records import (
    Calls,
    CollectiveCall,
    FlightRecord,
    PendingCall,
    ProcessGroup,
    RankEvidence,
    WorkerActivity,
    WorkersExamined,
    folded,
)
from ddplaunch.features.usage.quantities import QUANTITIES
from ddplaunch.features.usage.records import UsageSample, UsageSampled, UsageStarted
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import (
    AgentEnded,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    Output,
    Pong,
)
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.sharedctypes import Synchronized
    from pathlib import Path

WORKERS = 8
ROUNDS = 3
"""How often an agent sends a record of one kind; a phase counts for one of them."""

CALLS = 64
STACK = 60 * '  File "/usr/lib/python3/site-packages/torch/nn/modules/module.py", line 1751 in _wrapped_call_impl\n'
TAIL = tuple(f"epoch 3, step {number}: loss 0.123456, 1,234 samples/s, 12.3 GB in use" for number in range(200))

_FIRST_RANK = 7_000_000
"""Stands for the first rank of a node in a record that is made once, for all nodes."""

_HOST = "node7654321"


def host_name(node: int) -> str:
    """Of a simulated node."""
    return f"gpu{node + 1:05}"


# Records of a node, as bytes with the placeholders above.


def _exit(local_rank: int, outcome: str) -> WorkerExit:
    """The exit of a worker: rank 10 raises an exception, or all ranks lose their connection to it."""
    rank = _FIRST_RANK + local_rank
    plain = WorkerExit(rank, local_rank, _HOST, 1000, -15, True, time.time(), 60.0, log_file=f"/logs/{_HOST}/{rank}")
    if outcome != "failed":
        return plain
    error = WorkerError("RuntimeError: Connection closed by peer", "Traceback\n" + STACK, time.time())
    return replace(plain, returncode=1, stopped=False, error=error, tail=TAIL)


def _evidence(local_rank: int, node: int, everyone: str) -> RankEvidence:
    """What is known of a rank that waits for rank 1 in groups of all ranks, of the node, and of one rank per node."""
    waits = node > 0 or local_rank != 1
    own = f"{_FIRST_RANK}-{_FIRST_RANK + WORKERS - 1}"
    groups = tuple(ProcessGroup(str(number), name, members) for number, (name, members) in
                   enumerate({"default_pg": everyone, "fsdp": everyone, "tp": own}.items()))  # fmt: skip
    calls = tuple(
        CollectiveCall(group=number % 3, number=number // 3 + 1, operation="all_reduce", backend="nccl",
                       input_sizes=((4096, 1024),), output_sizes=((4096, 1024),), dtypes=("Float",),
                       is_done=number < CALLS)
        for number in range(CALLS + waits)
    )  # fmt: skip
    return RankEvidence(
        rank=_FIRST_RANK + local_rank, local_rank=local_rank, host=_HOST, pid=1000 + local_rank, silent_s=400.0,
        window_s=2.0, where="train.py:6 in step", stacks=STACK, collectives_moved=False,
        pending=PendingCall("all_reduce") if waits else None,
        flight_record=FlightRecord(groups=groups, made=Calls(calls), since_ns=waits * (1_790_000_000_000_000_000,)),
    )  # fmt: skip


def _left_by(evidence: RankEvidence) -> RankEvidence:
    """What is known of a rank that has failed: no stacks, and 16 calls."""
    assert evidence.flight_record
    return replace(evidence, stacks="", flight_record=shortened(evidence.flight_record, 16))


def _usage(number: int) -> UsageSampled:
    """The mean of five samples, as an agent on another machine sends every 10 s."""
    rows = {"w": WORKERS, "g": WORKERS, "n": 1}
    values = {each.name: tuple(1234.5 + row for row in range(rows[each.part])) for each in QUANTITIES}
    return UsageSampled(0, (UsageSample(at_s=10.0 * number, span_s=10.0, values=values),))


class _Records:
    """The records of all nodes of a job of ``count`` nodes."""

    def __init__(self, count: int) -> None:
        self._count = count
        everyone = f"0-{count * WORKERS - 1}"
        self._evidences = [tuple(_evidence(local, node, everyone) for local in range(WORKERS)) for node in (0, 1)]
        self._examined = [wire.encode(WorkersExamined(0, 1, folded(each))) for each in self._evidences]
        self._ended: dict[tuple[int, str, int], bytes] = {}

    def started(self, node: int, attempt: int) -> bytes:
        pids = tuple(range(1000, 1000 + WORKERS))
        ranks = self._count * WORKERS, pids, node, self._count, node * WORKERS
        usage = UsageStarted(attempt=attempt, at_s=1.0, ranks=tuple(range(ranks[-1], ranks[-1] + WORKERS)))
        return wire.encode(AttemptStarted(attempt, *ranks)) + wire.encode(usage)

    def examined(self, node: int) -> bytes:
        return _of_node(self._examined[node > 0], node)

    def ended(self, node: int, attempt: int, outcome: str) -> bytes:
        key = int(node > 0), outcome, attempt
        if key not in self._ended:
            exits = shorten([_exit(local, outcome) for local in range(WORKERS)], self._count)
            follows = outcome == "failed" and not attempt
            result = AttemptResult(attempt, outcome, exits, 60.0, attempt_follows=follows, restart_count=attempt,
                                   restart_follows=follows, cause=None if node else exits[0])  # type: ignore[arg-type]  # fmt: skip
            left = tuple(map(_left_by, self._evidences[key[0]]))
            known = (WorkersExamined(attempt, 0, folded(left)),) if outcome == "failed" else ()
            self._ended[key] = wire.encode(AttemptEnded(result, known))
        return _of_node(self._ended[key], node)

    @staticmethod
    def output(node: int) -> bytes:
        line = b"step 17: loss 0.123456, 1,234 samples/s\n"
        header = Output(host=host_name(node), rank=0, local_rank=0, stream="stdout", nbytes=len(line))
        ranks = ((node * WORKERS + local, local) for local in range(WORKERS))
        return b"".join(wire.encode(replace(header, rank=rank, local_rank=local)) + line for rank, local in ranks)


def _of_node(template: bytes, node: int) -> bytes:
    first = node * WORKERS

    def rank(match: re.Match[bytes]) -> bytes:
        return b"%d" % (int(match[0]) - _FIRST_RANK + first)

    return re.sub(rb"\b700000[0-9]\b", rank, template).replace(_HOST.encode(), host_name(node).encode())


# The job.


@dataclass
class Phase:
    """What the launcher's process used in one phase.

    Attributes:
        cpu_s: CPU seconds of one round.
        wall_s: seconds of all rounds.
        peak_mb: its largest memory in the phase.
        threads, descriptors: at the end of the phase.
    """

    name: str
    cpu_s: float
    wall_s: float
    peak_mb: float
    threads: int
    descriptors: int
    began_at: float


class Launcher:
    """The launcher's process, as another process sees it."""

    def __init__(self, pid: int, handled: Synchronized[int], is_pinging: Synchronized[int]) -> None:
        """``handled``: the number of records that it has handled, pongs not counted; ``is_pinging``: it sends pings."""
        self.pid, self.handled, self.is_pinging = pid, handled, is_pinging
        self._clock = (~pid << 3) | 2  # clock_getcpuclockid(3)

    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def reset_peak(self) -> None:
        with open(f"/proc/{self.pid}/clear_refs", "w") as file:
            file.write("5")

    def status(self, name: str) -> int:
        with open(f"/proc/{self.pid}/status") as file:
            return int(next(line for line in file if line.startswith(name)).split()[1])

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class Agents:
    """All simulated agents. ``run`` leads the job through its phases."""

    def __init__(self, count: int, port: int, folder: Path, launcher: Launcher) -> None:
        self._count, self._folder, self._launcher = count, folder, launcher
        self._records = _Records(count)
        self._selector = selectors.EpollSelector()
        self._unread = [b""] * count
        self._unsent: list[deque[bytes | Callable[[], bytes]]] = [deque() for _ in range(count)]
        self._channels = []
        for index in range(count):
            channel = socket.create_connection(("127.0.0.1", port))
            channel.setblocking(False)
            self._selector.register(channel, selectors.EVENT_READ, index)
            self._channels.append(channel)
        self.phases: list[Phase] = []
        self._pings = self._joined = self._examination = self._sent = 0
        self._is_stopping = False

    def run(self, *, is_stopped: bool) -> None:
        """The whole job; or one that the user stops by Ctrl-C soon after its start."""
        nodes = self._count
        with self._phase("start to ready"):
            self._wait(lambda: self._joined == nodes)
            self._send_each(lambda node: self._records.started(node, 0), 2)
        with self._phase("a second of pings", ROUNDS):
            self._beats()
        if is_stopped:
            self._stop()
            return
        with self._phase("a line of output of each rank", ROUNDS):
            for _ in range(ROUNDS):
                self._send_each(self._records.output, WORKERS)
        with self._phase("usage records, every 10 s", ROUNDS):
            for number in range(ROUNDS):
                self._send_all(_usage(number))
                time.sleep(2.0)  # Files are written a second later.
        with self._phase("activity reports, job quiet", ROUNDS):
            for number in range(ROUNDS):
                self._send_all(WorkerActivity(0, 30.0 * number, 30.0 * number))
        with self._phase("a second of pings, job quiet", ROUNDS):
            self._beats()
        with self._phase("examination and hang report"):
            self._send_all(WorkerActivity(0, 400.0, 400.0))
            self._wait(lambda: self._examination > 0)
            self._send_each(self._records.examined, 1)
            self._wait(lambda: (self._folder / "hang.txt").exists())
        with self._phase("all ranks fail"):
            self._send_each(lambda node: self._records.ended(node, 0, "failed"), 1)
        with self._phase("restart"):
            self._send_each(lambda node: self._records.started(node, 1), 2)
        with self._phase("all ranks fail again"):
            self._send_each(lambda node: self._records.ended(node, 1, "failed"), 1)
        with self._phase("end: failure page, report.json"):
            self._end()

    def _stop(self) -> None:
        with self._phase("Ctrl-C to the end"):
            self._is_stopping = True
            os.kill(self._launcher.pid, signal.SIGINT)
            self._wait_closed()

    def _end(self) -> None:
        self._send_each(lambda _: wire.encode(AgentEnded()), 1)
        self._send_each(lambda _: b"", 0)
        self._wait_closed()

    def _wait_closed(self) -> None:
        self._wait(lambda: not self._selector.get_map())
        self._wait(lambda: self._launcher.handled.value < 0)  # Its end.
        self._sent = -1

    @contextlib.contextmanager
    def _phase(self, name: str, rounds: int = 1) -> Iterator[None]:
        launcher, began_at, before_s = self._launcher, time.monotonic(), self._launcher.cpu_s()
        launcher.reset_peak()
        yield
        self._wait(lambda: launcher.handled.value >= self._sent)
        cpu_s = launcher.cpu_s() - before_s
        figures = launcher.status("VmHWM") / 1024, launcher.status("Threads"), launcher.descriptors()
        self.phases.append(Phase(name, cpu_s / rounds, time.monotonic() - began_at, *figures, began_at))

    def _beats(self) -> None:
        before, self._launcher.is_pinging.value = self._launcher.is_pinging.value, 1
        wanted = self._pings + ROUNDS * self._count
        self._wait(lambda: self._pings >= wanted)
        self._launcher.is_pinging.value = before

    def _send_all(self, record: object) -> None:
        line = wire.encode(record)
        self._send_each(lambda _: line, 1)

    def _send_each(self, line_of: Callable[[int], bytes], records: int) -> None:
        """Send what ``line_of`` makes for each node when its turn comes, and wait until the launcher has handled it."""
        self._sent += records * self._count
        for index in range(self._count):
            self._queue(index, lambda index=index: line_of(index))  # type: ignore[misc]
        self._wait(lambda: self._launcher.handled.value >= self._sent)

    # The connections.

    def _queue(self, index: int, data: bytes | Callable[[], bytes]) -> None:
        if self._channels[index].fileno() < 0:
            return
        if not self._unsent[index]:
            self._selector.modify(self._channels[index], selectors.EVENT_READ | selectors.EVENT_WRITE, index)
        self._unsent[index].append(data)

    def _write(self, index: int) -> None:
        waiting, channel = self._unsent[index], self._channels[index]
        while waiting:
            data = waiting[0]() if callable(waiting[0]) else waiting[0]
            try:
                sent = channel.send(data) if data else channel.shutdown(socket.SHUT_WR) or 0
            except BlockingIOError:
                sent = 0
            except OSError:  # The launcher has closed the connection of an agent that has ended.
                waiting.clear()
                break
            if sent < len(data):
                waiting[0] = data[sent:]
                return
            waiting.popleft()
        self._selector.modify(channel, selectors.EVENT_READ, index)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            for key, events in self._selector.select(0.01):
                if events & selectors.EVENT_WRITE:
                    self._write(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)

    def _read(self, index: int) -> None:
        channel = self._channels[index]
        data = b""
        with contextlib.suppress(ConnectionError):
            data = channel.recv(1 << 16)
        if not data:
            self._selector.unregister(channel)
            self._unsent[index].clear()
            channel.close()
        *lines, self._unread[index] = (self._unread[index] + data).split(b"\n")
        for line in lines:
            self._answer(index, json.loads(line))

    def _answer(self, index: int, record: dict[str, Any]) -> None:
        match record:
            case {"record": "AgentSpec"}:
                self._sent += 1
                self._queue(index, wire.encode(AgentReady(WORKERS)))
            case {"record": "Ping", "time_s": sent_s}:
                self._pings += 1
                self._queue(index, wire.encode(Pong(sent_s, time.time())))
            case {"record": "JoinRendezvous", "rendezvous": settings}:
                if settings.get("is_server"):
                    self._sent += 1
                    self._queue(index, wire.encode(EndpointOpen(settings["token"], ("10.0.0.1",), 4321)))
                self._joined += 1
            case {"record": "ExamineWorkers", "number": number}:
                self._examination = number
            case {"record": "StopWorkers"} if self._is_stopping:
                self._queue(index, self._records.ended(index, 0, "stopped") + wire.encode(AgentEnded()))
                self._queue(index, b"")
