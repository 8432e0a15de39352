"""What a run costs the launcher and the coordinator as it grows: the real loops and records, pretended nodes.

The nodes answer at once. What they say was encoded before the clock runs, what they are told is encoded and counted.
Every size runs in a process of its own, since its peak of memory counts. CPU time, so that neighbours do not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ddplaunch import protocol
from ddplaunch.config import LaunchConfig
from ddplaunch.hosts import Host
from ddplaunch.launcher import launcher, remote
from ddplaunch.launcher.handles import AgentConnected, AgentLost, FromNode
from ddplaunch.launcher.ssh_nodes import SshNodes
from ddplaunch.mailbox import Mailbox
from ddplaunch.model import AgentSpec, AttemptResult, WorkerError, WorkerExit
from ddplaunch.records import (
    FROM_AGENT,
    AgentEnded,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    Meet,
    Ping,
    Pong,
)
from ddplaunch.rendezvous.coordinator import Coordinator, Sent
from ddplaunch.rounds import ListenForStore, NodeEnded, NodeGone, NodeJoined, StoreListens, WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZES = (250, 500, 1000, 2000, 4000)
WORKERS = 8
BEATS = 3
FAILING_NODE = 100

_TAIL = tuple(f"epoch 3, step {number}: loss 0.123456, 1,234 samples/s, 12.3 GB in use" for number in range(200))
_ERROR = WorkerError("ValueError: as asked", "Traceback\n" + 20 * "  File 'train.py', line 1, in main\n", 0.0)


def worker_exit(node: int, local_rank: int) -> WorkerExit:
    """How a worker ended when the third of ``FAILING_NODE`` raised."""
    rank, host = node * WORKERS + local_rank, host_name(node)
    plain = WorkerExit(rank, local_rank, host, 1000, -15, True, time.time(), 60.0, log_file=f"/logs/{host}/{rank}")
    if node != FAILING_NODE or local_rank != 2:
        return plain
    return replace(plain, returncode=1, stopped=False, error=_ERROR, tail=_TAIL)


def host_name(node: int) -> str:
    return f"gpu{node + 1:04}"


# The launcher.


class Agents:
    """What the agents of all nodes say, as lines that were encoded beforehand."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ready = protocol.encode(AgentReady(1, WORKERS))
        self.pong = protocol.encode(Pong())
        self.ended = protocol.encode(AgentEnded())
        size = count * WORKERS
        self.started = [
            protocol.encode(AttemptStarted(0, size, "10.0.0.1", 1234, tuple(range(WORKERS)), n, n * WORKERS))
            for n in range(count)
        ]
        cause = worker_exit(FAILING_NODE, 2)
        self.results = [protocol.encode(AttemptEnded(self._result(n, cause if n == 0 else None))) for n in range(count)]

    def _result(self, node: int, cause: WorkerExit | None) -> AttemptResult:
        exits = tuple(worker_exit(node, local_rank) for local_rank in range(WORKERS))
        return AttemptResult(0, "failed" if node == FAILING_NODE else "stopped", exits, 60.0, cause=cause)


class Nodes(SshNodes):
    """Connects to nobody."""

    def __init__(self, config: LaunchConfig, agents: Agents, post: Callable[[object], None]) -> None:
        super().__init__(config, "bench", "bench", None, None, post)  # type: ignore[arg-type]
        self.agents = agents
        self.sent_bytes = 0
        self._invited = 0

    def start(self, index: int) -> Handle:  # type: ignore[override]
        facts = {"pid": 1, "host": host_name(index), "python": "3.11.0", "ddplaunch": "0.1", "torch": "2.13"}
        line = remote.MARK + json.dumps(facts).encode()
        self.says(index, AgentConnected(remote.read_facts(line)))
        return Handle(index, self)

    def says(self, index: int, event: object) -> None:
        self._post(FromNode(index, protocol.decode(event, FROM_AGENT) if isinstance(event, bytes) else event))

    def told(self, index: int, record: object) -> None:
        """An agent's answer."""
        self.sent_bytes += len(protocol.encode(record))
        match record:
            case AgentSpec():
                self.says(index, self.agents.ready)
            case Ping():
                self.says(index, self.agents.pong)
            case Meet(meeting=meeting):
                if meeting.serves:
                    self.says(index, protocol.encode(EndpointOpen(meeting.token, ("10.0.0.1",), 4321)))
                self._invited += 1
                if self._invited == self.agents.count:  # They meet.
                    for node, line in enumerate(self.agents.started):
                        self.says(node, line)


class Handle:
    """On a pretended agent."""

    def __init__(self, index: int, nodes: Nodes) -> None:
        self._index, self._nodes = index, nodes

    def send(self, record: object) -> None:
        self._nodes.told(self._index, record)

    def wake(self) -> None: ...

    def kill(self) -> None: ...

    def end_input(self) -> None: ...

    def close(self, timeout_s: float = 5.0) -> int:
        return 0


class Play(Mailbox[object]):
    """The launcher's mailbox. Whenever it is empty, the launcher has done all there was, and the next scene begins."""

    def __init__(self, agents: Agents) -> None:
        super().__init__()
        self.nodes: Nodes | None = None
        self._agents = agents
        self._scenes = self._play()
        self.cpu_s: dict[str, float] = {}
        self._before_s = time.process_time()

    def get(self, deadline: float = math.inf) -> object:
        if self._queue.empty():
            next(self._scenes, None)
        return super().get(deadline)

    def ends(self, scene: str) -> None:
        now = time.process_time()
        self.cpu_s[scene], self._before_s = now - self._before_s, now

    def _play(self) -> Iterator[None]:
        assert self.nodes
        self.ends("start")
        for _ in range(BEATS):
            yield  # Until the launcher asks everybody.
        self.ends("beats")
        for index, line in enumerate(self._agents.results):
            self.nodes.says(index, line)
        yield
        for index in range(self._agents.count):
            self.nodes.says(index, self._agents.ended)
            self.nodes.says(index, AgentLost())


@dataclass(frozen=True)
class LauncherCost:
    """Of a run of ``nodes``; ``beat_s`` is what a second costs while the job runs, memory is beyond what was there."""

    nodes: int
    start_s: float
    beat_s: float
    end_s: float
    memory_mb: float
    sent_mb: float


def launcher_cost(count: int) -> LauncherCost:
    """Start ``count`` nodes, let the job run for some seconds, and fail one worker."""
    agents = Agents(count)
    play = Play(agents)

    def starter_for(config: LaunchConfig, *rest: object) -> Nodes:
        play.nodes = Nodes(config, agents, rest[4])  # type: ignore[arg-type]
        return play.nodes

    launcher.starter_for = starter_for  # type: ignore[assignment]
    hosts = tuple(Host(host_name(n)) for n in range(count))
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            script="train.py", hosts=hosts, min_nodes=count, max_nodes=count, nproc_per_node=WORKERS, log_dir=folder
        )
        before_mb = peak_mb()
        play._before_s = time.process_time()
        result = launcher._Run(config, "scale", "scale", None, play, 1).run()
        play.ends("end")
    assert (result.exit_code, len(result.attempts[0].exits)) == (1, WORKERS * count), result.outcome
    assert play.nodes
    times = play.cpu_s["start"], play.cpu_s["beats"] / BEATS, play.cpu_s["end"]
    return LauncherCost(count, *times, peak_mb() - before_mb, play.nodes.sent_bytes / 1e6)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# The coordinator.


@dataclass(frozen=True)
class CoordinatorCost:
    """Of one round; bytes as they go through the store."""

    nodes: int
    join_s: float
    round_s: float
    sent_records: int
    sent_mb: float


def coordinator_cost(count: int) -> CoordinatorCost:
    """All join, one worker fails, all end."""
    coordinator = Coordinator(0, count, count, 0, tuple(range(count)))
    sent: list[int] = []

    def tell(message: object) -> Sequence[Sent]:
        messages = coordinator.receive(message)
        sent.extend(len(protocol.encode(each.record)) for each in messages)
        return messages

    started_s = time.process_time()
    told = [each for node in range(count) for each in tell(NodeJoined(node, host_name(node), WORKERS, "10.0.0.1"))]
    joined_s = time.process_time()
    assert isinstance(told[-1].record, ListenForStore)
    tell(StoreListens(0, "10.0.0.1", 1234))
    tell(WorkerFailed(FAILING_NODE, 0))
    for node in range(count):
        cause = worker_exit(node, 2) if node == FAILING_NODE else None
        tell(NodeEnded(node, 0, failed=bool(cause), cause=cause))
    for node in range(1, count):
        tell(NodeGone(node))
    round_s = time.process_time() - joined_s
    return CoordinatorCost(count, joined_s - started_s, round_s, len(sent), sum(sent) / 1e6)


# The table.


MEASURES = {"launcher": launcher_cost, "coordinator": coordinator_cost}


def measured(what: str, count: int) -> dict[str, float]:
    """In a process of its own."""
    command = (sys.executable, __file__, what, str(count))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def print_growth(what: str, rows: list[dict[str, float]]) -> None:
    """The last line is by how much the largest size costs more per node than the one of a quarter of it."""
    names = list(rows[0])
    print(f"\n{what}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        print(
            f"| {' | '.join(f'{value:.3g}' if isinstance(value, float) else f'{value:,}' for value in row.values())} |"
        )
    small, large = rows[-3], rows[-1]
    factor = large["nodes"] / small["nodes"]
    shown = [f"{large[name] / max(small[name], 1e-3) / factor:.2f}x" for name in names[1:]]
    print(f"| per node, {large['nodes']:,} / {small['nodes']:,} | {' | '.join(shown)} |")


def main() -> None:
    if len(sys.argv) == 3:
        with contextlib.redirect_stdout(sys.stderr):
            cost = MEASURES[sys.argv[1]](int(sys.argv[2]))
        print(json.dumps(asdict(cost)))
        return
    print(f"{os.cpu_count()} cores, {platform.machine()}, {time.strftime('%Y-%m-%d')}; {WORKERS} workers a node")
    for what in MEASURES:
        print_growth(what, [measured(what, count) for count in SIZES])


if __name__ == "__main__":
    main()
