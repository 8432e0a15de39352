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
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, OutputConfig, WorkerConfig
from ddplaunch.launcher import run, setup
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
from ddplaunch.rendezvous.coordinator import Coordinator, Outgoing
from ddplaunch.transport import remote_start
from ddplaunch.transport.handle import AgentConnected, ChannelClosed, FromNode, discard_output
from ddplaunch.transport.ssh.handle import SshTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZES = (250, 500, 1000, 2000, 4000)
WORKERS = 8
BEATS = 3
FAILING_NODE = 100

_TAIL = tuple(f"epoch 3, step {number}: loss 0.123456, 1,234 samples/s, 12.3 GB in use" for number in range(200))
_ERROR = WorkerError("ValueError: injected", "Traceback\n" + 20 * "  File 'train.py', line 1, in main\n", 0.0)


def worker_exit(node: int, local_rank: int) -> WorkerExit:
    """The exit of a worker after local rank 2 of ``FAILING_NODE`` raised an exception."""
    rank, host = node * WORKERS + local_rank, host_name(node)
    plain = WorkerExit(rank, local_rank, host, 1000, -15, True, time.time(), 60.0, log_file=f"/logs/{host}/{rank}")
    if node != FAILING_NODE or local_rank != 2:
        return plain
    return replace(plain, returncode=1, stopped=False, error=_ERROR, tail=_TAIL)


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
        size = count * WORKERS
        self.started = [
            wire.encode(AttemptStarted(0, size, tuple(range(WORKERS)), n, n * WORKERS)) for n in range(count)
        ]
        cause = worker_exit(FAILING_NODE, 2)
        self.results = [wire.encode(AttemptEnded(self._result(n, cause if n == 0 else None))) for n in range(count)]

    def _result(self, node: int, cause: WorkerExit | None) -> AttemptResult:
        exits = tuple(worker_exit(node, local_rank) for local_rank in range(WORKERS))
        return AttemptResult(0, "failed" if node == FAILING_NODE else "stopped", exits, 60.0, cause=cause)


class Nodes(SshTransport):
    """The transport of simulated nodes."""

    def __init__(self, config: LaunchConfig, agents: Agents, post: Callable[[object], None]) -> None:
        super().__init__(config, setup.node_names(config), "bench", discard_output, post)
        self.agents = agents
        self.sent_bytes = 0
        self._joining = 0

    def start(self, index: int) -> Handle:  # type: ignore[override]
        facts = {"pid": 1, "python": "3.11.0", "ddplaunch": "0.1", "torch": "2.13"}
        line = remote_start.FACTS_PREFIX + json.dumps(facts).encode()
        self.post(index, AgentConnected(remote_start.read_facts(line)))
        return Handle(index, self)

    def post(self, index: int, event: object) -> None:
        self._post(FromNode(index, wire.decode(event, FROM_AGENT) if isinstance(event, bytes) else event))

    def receive(self, index: int, record: object) -> None:
        """Answer a record as the agent of node ``index`` would."""
        self.sent_bytes += len(wire.encode(record))
        match record:
            case AgentSpec():
                self.post(index, self.agents.ready)
            case Ping():
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
        self._before_s = time.process_time()

    def get(self, deadline: float = math.inf) -> object:
        if self._queue.empty():
            next(self._phases, None)
        return super().get(deadline)

    def end_phase(self, name: str) -> None:
        now = time.process_time()
        self.cpu_s[name], self._before_s = now - self._before_s, now

    def _run_phases(self) -> Iterator[None]:
        assert self.nodes
        self.end_phase("start")
        for _ in range(BEATS):
            yield  # Until the launcher pings all nodes.
        self.end_phase("beats")
        for index, line in enumerate(self._agents.results):
            self.nodes.post(index, line)
        yield
        for index in range(self._agents.count):
            self.nodes.post(index, self._agents.ended)
            self.nodes.post(index, ChannelClosed())


@dataclass(frozen=True)
class LauncherCost:
    """CPU seconds of a run of ``nodes``: its start, one round of pings, its end; and additional peak memory."""

    nodes: int
    start_s: float
    beat_s: float
    end_s: float
    memory_mb: float
    sent_mb: float


def launcher_cost(count: int) -> LauncherCost:
    """Start ``count`` nodes, let the job run for some seconds, and fail one worker."""
    agents = Agents(count)
    mailbox = ScriptedMailbox(agents)

    def transport_for(config: LaunchConfig, *rest: object) -> Nodes:
        mailbox.nodes = Nodes(config, agents, rest[2])  # type: ignore[arg-type]
        return mailbox.nodes

    setup.transport_for = transport_for  # type: ignore[assignment]
    hosts = tuple(Host(host_name(n)) for n in range(count))
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            script="train.py",
            hosts=hosts,
            min_nodes=count,
            max_nodes=count,
            workers=WorkerConfig(nproc_per_node=WORKERS),
            output=OutputConfig(log_dir=folder),
        )
        before_mb = peak_mb()
        mailbox._before_s = time.process_time()
        result = run.Run(config, "scale", "scale", None, mailbox, 1).run()
        mailbox.end_phase("end")
    assert (result.exit_code, len(result.attempts[0].exits)) == (1, WORKERS * count), result.outcome
    assert mailbox.nodes
    times = mailbox.cpu_s["start"], mailbox.cpu_s["beats"] / BEATS, mailbox.cpu_s["end"]
    return LauncherCost(count, *times, peak_mb() - before_mb, mailbox.nodes.sent_bytes / 1e6)


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
    coordinator = Coordinator(0, count, count, 0, tuple(range(count)))
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
        receive(WorkersEnded(node, 0, failed=bool(cause), cause=cause))
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
    """Print a table; its last line is the cost per node of the largest size, relative to a quarter of that size."""
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
