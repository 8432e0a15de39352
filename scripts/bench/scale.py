"""CPU time and memory of launcher and coordinator for up to 4,000 nodes: real loops and records, simulated nodes.

The nodes answer at once. Their records are encoded before the measurement; records for them are encoded and counted.
Each size runs in a separate process, because peak memory is measured. CPU time is independent of other load.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common import size

from ddplaunch import features
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, OutputConfig, WorkerConfig
from ddplaunch.features.hangs.records import WorkerActivity
from ddplaunch.features.remote import remote_start
from ddplaunch.launcher import run, setup
from ddplaunch.launcher.display.console import Console
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import (
    FROM_AGENT,
    AgentEnded,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    JoinRendezvous,
    Ping,
    Pong,
)
from ddplaunch.protocol.rendezvous import (
    ListenForWorkersStore,
    NodeJoined,
    NodeLeft,
    NodeStops,
    WorkersEnded,
    WorkersStoreListens,
)
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.rounds.coordinator import Coordinator, Outgoing
from ddplaunch.rounds.verdict import Restarts
from ddplaunch.transport.handle import AgentConnected, ChannelClosed, FromNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZES = size("BENCH_NODES", (64, 256, 1024, 4000), (2, 8))
WORKERS = 8
BEATS = size("BENCH_BEATS", 3, 1)
QUIET_REPORTS = 3
"""Times that every node reports that its workers are quiet."""

FAILING_NODE = 1

_TAIL = tuple(f"epoch 3, step {number}: loss 0.123456, 1,234 samples/s, 12.3 GB in use" for number in range(200))
_ERROR = WorkerError("ValueError: injected", "Traceback\n" + 20 * "  File 'train.py', line 1, in main\n", 0.0)


def worker_exit(node: int, local_rank: int, error: WorkerError | None = None) -> WorkerExit:
    """The exit of a worker after local rank 2 of ``FAILING_NODE`` raised an exception, or all of them ``error``."""
    rank, host = node * WORKERS + local_rank, host_name(node)
    plain = WorkerExit(rank, local_rank, host, 1000, -15, True, time.time(), 60.0, log_file=f"/logs/{host}/{rank}")
    is_first = node == FAILING_NODE and local_rank == 2
    if not error and not is_first:
        return plain
    return replace(plain, returncode=1, stopped=False, error=error or _ERROR, tail=_TAIL)


def host_name(node: int) -> str:
    return f"gpu{node + 1:04}"


# The launcher.


class Agents:
    """The records of the agents of all nodes, already encoded."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ready = wire.encode(AgentReady(WORKERS))
        self.pong = wire.encode(Pong())
        self.ended = wire.encode(AgentEnded())
        ranks, pids = count * WORKERS, tuple(range(WORKERS))
        self.started = [wire.encode(AttemptStarted(0, ranks, pids, n, count, n * WORKERS)) for n in range(count)]
        cause = worker_exit(FAILING_NODE, 2)
        self.results = [wire.encode(AttemptEnded(self._result(n, cause if n == 0 else None))) for n in range(count)]

    def _result(self, node: int, cause: WorkerExit | None) -> AttemptResult:
        exits = tuple(worker_exit(node, local_rank) for local_rank in range(WORKERS))
        return AttemptResult(0, "failed" if node == FAILING_NODE else "stopped", exits, 60.0, cause=cause)


class Nodes:
    """The transport of simulated nodes."""

    is_remote = True

    def __init__(self, hosts: tuple[str, ...], agents: Agents, post: Callable[[object], None]) -> None:
        self.node_names, self.agents, self._post = hosts, agents, post
        self.sent_bytes = self.pings = 0
        self._joining = 0

    def start(self, index: int) -> Handle:
        facts = {"pid": 1, "python": "3.11.0", "ddplaunch": "0.1", "torch": "2.13"}
        line = remote_start.FACTS_PREFIX + json.dumps(facts).encode()
        self.post(index, AgentConnected(remote_start.read_facts(line)))
        return Handle(index, self)

    def close(self) -> None: ...

    def post(self, index: int, event: object) -> None:
        if isinstance(event, bytes):
            event = wire.decode(event, FROM_AGENT, partial(features.records, "FROM_AGENT"))
        self._post(FromNode(index, event))

    def post_each(self, event: bytes) -> None:
        for index in range(self.agents.count):
            self.post(index, event)

    def receive(self, index: int, record: object) -> None:
        """Answer a record as the agent of node ``index`` would."""
        self.sent_bytes += len(wire.encode(record))
        match record:
            case AgentSpec():
                self.post(index, self.agents.ready)
            case Ping():
                self.pings += 1
                self.post(index, self.agents.pong)
            case JoinRendezvous(rendezvous=settings):
                if settings.is_server:
                    self.post(index, wire.encode(EndpointOpen(settings.token, ("10.0.0.1",), 4321)))
                self._joining += 1
                if self._joining == self.agents.count:  # The round forms.
                    for node, line in enumerate(self.agents.started):
                        self.post(node, line)


class Handle:
    """The handle of a simulated agent."""

    def __init__(self, index: int, nodes: Nodes) -> None:
        self._index, self._nodes = index, nodes
        self.inherited_fds: dict[str, int] = {}
        self.heard_at = 0.0

    def send(self, record: object) -> None:
        self._nodes.receive(self._index, record)

    def wake(self) -> None: ...

    def kill(self) -> None: ...

    def end_input(self) -> None: ...

    def close(self, timeout_s: float = 5.0) -> int:
        return 0


class ScriptedMailbox(Mailbox[object]):
    """The launcher's mailbox. When it is empty, the launcher is idle, and the next phase of the run begins."""

    def __init__(self, agents: Agents) -> None:
        super().__init__()
        self.nodes: Nodes | None = None
        self._agents = agents
        self._phases = self._run_phases()
        self.cpu_s: dict[str, float] = {}
        self.before_s = time.process_time()

    def get(self, deadline: float = math.inf) -> object:
        if self.is_empty and deadline:  # 0: the launcher only looks, while it starts nodes.
            next(self._phases, None)
        return super().get(deadline)

    def end_phase(self, name: str) -> None:
        now = time.process_time()
        self.cpu_s[name], self.before_s = now - self.before_s, now

    def _beats(self) -> Iterator[None]:
        """Until the launcher has pinged all nodes ``BEATS`` times."""
        assert self.nodes
        wanted = self.nodes.pings + BEATS * self._agents.count
        while self.nodes.pings < wanted:
            yield

    def _run_phases(self) -> Iterator[None]:
        assert self.nodes
        self.end_phase("start")
        yield from self._beats()
        self.end_phase("beats")
        for number in range(QUIET_REPORTS):
            self.nodes.post_each(wire.encode(WorkerActivity(0, 30.0 * number, 30.0 * number)))
            yield
        self.end_phase("reports")
        yield from self._beats()
        self.end_phase("quiet beats")
        for index, line in enumerate(self._agents.results):
            self.nodes.post(index, line)
        yield
        for index in range(self._agents.count):
            self.nodes.post(index, self._agents.ended)
            self.nodes.post(index, ChannelClosed())


@dataclass(frozen=True)
class LauncherCost:
    """CPU seconds of a run of ``nodes``, and additional peak memory.

    Its start; a second of pings before and after all nodes have reported that they are quiet; one such report of each
    node; its end.
    """

    nodes: int
    start_s: float
    beat_s: float
    report_s: float
    quiet_beat_s: float
    end_s: float
    memory_mb: float
    sent_mb: float


def launcher_cost(count: int) -> LauncherCost:
    """Start ``count`` nodes, let the job run and be quiet for some seconds, and fail one worker."""
    agents, before_mb = Agents(count), peak_mb()
    mailbox, hosts = ScriptedMailbox(agents), tuple(Host(host_name(n)) for n in range(count))
    mailbox.nodes = Nodes(tuple(map(str, hosts)), agents, mailbox.post)
    setup.transport_for = lambda *_: mailbox.nodes  # type: ignore[assignment, return-value]
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as null:
        folder = Path(name)
        workers, output = WorkerConfig(nproc_per_node=WORKERS), OutputConfig(log_dir=name, page=False)
        config = LaunchConfig(
            script="train.py", hosts=hosts, min_nodes=count, max_nodes=count, workers=workers, output=output
        )
        console = Console(setup.console_style(config, folder, null.fileno()), null.fileno(), null.fileno())
        mailbox.before_s = time.process_time()
        result = run.Run(config, "scale", "scale", None, mailbox, folder, console).run()
        mailbox.end_phase("end")
        console.close()
    assert (result.exit_code, len(result.attempts[0].exits)) == (1, WORKERS * count), result.outcome
    cpu_s = mailbox.cpu_s
    each = cpu_s["beats"] / BEATS, cpu_s["reports"] / QUIET_REPORTS, cpu_s["quiet beats"] / BEATS
    memory_mb, sent_mb = peak_mb() - before_mb, mailbox.nodes.sent_bytes / 1e6
    return LauncherCost(count, cpu_s["start"], *each, cpu_s["end"], memory_mb, sent_mb)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# The coordinator.


@dataclass(frozen=True)
class CoordinatorCost:
    """CPU seconds of one round, and the records sent through the store."""

    nodes: int
    join_s: float
    round_s: float
    sent_records: int
    sent_mb: float


def coordinator_cost(count: int) -> CoordinatorCost:
    """All nodes join, one worker fails, all nodes leave."""
    coordinator = Coordinator(0, count, count, Restarts(0), tuple(range(count)))
    sent: list[int] = []

    def receive(message: object) -> Sequence[Outgoing]:
        messages = coordinator.receive(message)
        sent.extend(len(wire.encode(each.record)) for each in messages)
        return messages

    started_s = time.process_time()
    joined = [each for node in range(count) for each in receive(NodeJoined(node, host_name(node), WORKERS, "10.0.0.1"))]
    joined_s = time.process_time()
    assert isinstance(joined[-1].record, ListenForWorkersStore)
    receive(WorkersStoreListens(0, 0, "10.0.0.1", 1234))
    receive(NodeStops(FAILING_NODE, 0))
    for node in range(count):
        cause = worker_exit(node, 2) if node == FAILING_NODE else None
        receive(WorkersEnded(0, "failed" if cause else "stopped", cause=cause, node_index=node))
    for node in range(1, count):
        receive(NodeLeft(node))
    round_s = time.process_time() - joined_s
    return CoordinatorCost(count, joined_s - started_s, round_s, len(sent), sum(sent) / 1e6)


# The result table.


MEASURES = {"launcher": launcher_cost, "coordinator": coordinator_cost}


def measured(what: str, count: int) -> dict[str, float]:
    """The cost of a run of ``count`` nodes, measured in a separate process."""
    command = (sys.executable, __file__, what, str(count))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def print_growth(what: str, rows: list[dict[str, float]]) -> None:
    """Print a table; its last line is the cost per node of the largest size, relative to the size before."""
    names = list(rows[0])
    print(f"\n{what}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        print(
            f"| {' | '.join(f'{value:.3g}' if isinstance(value, float) else f'{value:,}' for value in row.values())} |"
        )
    small, large = rows[-2], rows[-1]
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
