"""Records between launcher and agent, one JSON line each (see ``wire``).

Two groups: launcher to agent, and agent to launcher. Each docstring begins with the sender and the occasion. The tuples
at the end list the records that each reader accepts. No behaviour belongs here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.config import RendezvousConfig
from ddplaunch.features.debug import records as debugging
from ddplaunch.features.faults import records as fault_injection
from ddplaunch.features.hangs.records import NodeEvidence, RankEvidence
from ddplaunch.features.health import records as health
from ddplaunch.features.health.records import HardwareOfNode
from ddplaunch.features.slow_ranks.records import CollectivesSampled
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import log_transfer, wire
from ddplaunch.protocol.field_types import (
    Count,
    Failure,
    FolderName,
    OneLine,
    Pids,
    Port,
    RunId,
    Seconds,
    SignalNumber,
    Size,
    at_most,
)
from ddplaunch.protocol.results import (
    AssignNodes,
    AttemptResult,
    NeedsRendezvous,
    NodeDeparts,
    NodeSilent,
    StreamName,
    Workers,
)
from ddplaunch.protocol.specs import AgentSpec

_MAX_GPUS = 1024
_MAX_ADDRESSES = 1024

_Participants = Annotated[tuple[Count, ...], at_most(1 << 16)]


# Launcher to agent. The first record is an AgentSpec, a SweepRun or one of ``queries``.
@dataclass(frozen=True)
class SweepRun:
    """Launcher to agent, in place of an AgentSpec, after the loss of a node's agent.

    Kill all processes with ``node_tag`` on this machine except ``excluded_pids``; answered by AgentEnded.
    """

    node_tag: str
    excluded_pids: Pids


@dataclass(frozen=True)
class JoinRendezvous:
    """Launcher to agent: join ``rendezvous``, and leave an earlier one.

    Sent before the first attempt, and each time the rendezvous moves to another node.
    """

    rendezvous: RendezvousConfig


@dataclass(frozen=True)
class Ping:
    """Launcher to agent, periodically, on other machines and on a partitioned node of a dry run; answered by Pong.

    After ``lost_after_s`` seconds without a Ping, the agent counts the launcher as lost. ``time_s``: its wall clock.
    """

    lost_after_s: Seconds
    time_s: Seconds = 0.0


@dataclass(frozen=True)
class StopWorkers:
    """Launcher to agent: stop the run. Repeated with a shorter ``grace_s`` when the user presses Ctrl-C again.

    The agent sends ``signum`` to every worker's process group, and SIGKILL after ``grace_s`` seconds.
    """

    signum: SignalNumber
    grace_s: Seconds


@dataclass(frozen=True)
class PassSignal:
    """Launcher to agent: send ``signum`` (SIGUSR1 or SIGUSR2) to every worker, without stopping it."""

    signum: SignalNumber


@dataclass(frozen=True)
class ExamineWorkers:
    """Launcher to agent: find out what the workers of ``attempt`` do; answered by WorkersExamined ``number``.

    Attributes:
        is_requested: by the user, who wants to know what moves now: the agent does not compare with an earlier sample,
            and answers at once if none of these workers runs any more.
        all_nodes_at: set by the agent where each node has its own launcher, and another node serves the rendezvous:
            only this node is examined, and only its launcher gets the answer. Endpoint of the rendezvous.
    """

    attempt: Count
    number: Count
    is_requested: bool = False
    all_nodes_at: OneLine = ""


@dataclass(frozen=True)
class SampleCollectives:
    """Launcher to all agents, about once a minute: when did the workers of ``attempt`` call collectives?

    Answered by CollectivesSampled ``number``. ``suspects`` are ranks whose GPUs are asked whether they are throttled.
    """

    attempt: Count
    number: Count
    suspects: tuple[Count, ...] = ()


@dataclass(frozen=True)
class AbortHungAttempt:
    """Launcher to all agents: the attempt hangs, for this ``reason``.

    The agent collects the Python stacks of the workers of ``attempt`` and stops them; the attempt has failed.
    """

    attempt: Count
    reason: str


@dataclass(frozen=True)
class OrderToNodes:
    """Launcher to agent, and on to the coordinator, where each node has its own launcher: ``order`` is for all nodes.

    Sent by the launcher that receives the ReportOfNode records; any launcher sends it for a requested examination.
    """

    order: ExamineWorkers | SampleCollectives | AbortHungAttempt


# Agent to launcher. The last record is AgentEnded, followed by the log files if AgentSpec.sends_logs.


@dataclass(frozen=True)
class AgentReady:
    """Agent to launcher, once: the agent has read its spec and can start ``local_world_size`` workers."""

    local_world_size: Workers


@dataclass(frozen=True)
class NodeDetails:
    """Agent to launcher, once, after AgentReady: what the workers of this node use, for the report.

    Attributes:
        cpus: number of CPUs that this node's processes may use.
        gpus: models of the GPUs that its workers may use; an empty text for an unknown model.
        python: version of the workers' interpreter; empty if it is not the agent's.
        torch: version of torch in that interpreter; empty if it has none.
    """

    cpus: Count
    gpus: Annotated[tuple[OneLine, ...], at_most(_MAX_GPUS)]
    python: OneLine
    torch: OneLine


@dataclass(frozen=True)
class EndpointOpen:
    """Agent to launcher, from the node that must serve the store of rendezvous ``token``: it listens at ``port``.

    ``addresses`` are the node's, best first. The launcher then sends JoinRendezvous to the other nodes.
    """

    token: str
    addresses: Annotated[tuple[OneLine, ...], at_most(_MAX_ADDRESSES)]
    port: Port


@dataclass(frozen=True)
class RunIdAgreed:
    """Agent to launcher, where every node has one: the node has joined the others, and all nodes have this run id."""

    run_id: RunId


@dataclass(frozen=True)
class FirstRoundFormed:
    """Agent to launcher, where every node has one, before its first attempt: the node takes part in the run.

    ``moved_to``: the agent has moved the launcher's run folder, into a folder beside it: the name of that folder, and
    the new name. Empty: it is where it was, or no files are kept.
    """

    moved_to: Annotated[tuple[FolderName, ...], at_most(2)] = ()


@dataclass(frozen=True)
class AttemptStarted:
    """Agent to launcher: all workers of this node's part of an attempt run.

    ``pids`` is in order of local rank; the first worker has rank ``first_rank``. ``import_s``: seconds that the node
    needed to import torch before it could start workers.
    """

    attempt: Count
    world_size: Count
    pids: Annotated[Pids, at_most(MAX_SLOTS_PER_HOST)]
    node_rank: Count
    nnodes: Count
    first_rank: Count
    import_s: Seconds = 0.0


@dataclass(frozen=True)
class Output(wire.Chunk):
    """Agent to launcher: header of ``nbytes`` raw bytes of one stream, which follow the record's line.

    The bytes are whole lines, or an unfinished last line, which the next bytes continue (``goes_on``). Before them,
    ``lost_lines`` lines were dropped because the launcher read too slowly.
    """

    host: OneLine
    rank: Count
    local_rank: Count
    stream: StreamName
    nbytes: wire.ChunkSize
    lost_lines: Size = 0
    attempt: Count = 0
    goes_on: bool = False


@dataclass(frozen=True)
class WorkerActivity:
    """Agent to launcher, repeated: for how long the workers of ``attempt`` have been quiet, or have only written.

    Attributes:
        quiet_s: seconds since a worker wrote output, or called or finished a collective; 0: they are active again.
        still_s: as ``quiet_s``, and no worker that does not wait in a collective used a CPU, or read or wrote data.
        is_finished: the attempt ends on this node; the other fields have no meaning.
        waiting_s: seconds since a worker called or finished a collective, whatever else they did; 0: just now, or it is
            not known.
        has_waiting: a worker waits in a collective.
        host: display name of the node.
    """

    attempt: Count
    quiet_s: Seconds = 0.0
    still_s: Seconds = 0.0
    is_finished: bool = False
    waiting_s: Seconds = 0.0
    has_waiting: bool = False
    host: OneLine = ""


@dataclass(frozen=True)
class WorkersExamined:
    """Agent to launcher, in answer to ExamineWorkers ``number``; or with number 0 before a stop of quiet workers.

    ``node`` is None where NCCL and the GPUs were not asked. ``all_nodes_at`` is that of ExamineWorkers.
    """

    attempt: Count
    number: Count
    ranks: Annotated[tuple[RankEvidence, ...], at_most(MAX_SLOTS_PER_HOST)]
    node: NodeEvidence | None = None
    all_nodes_at: OneLine = ""


Report = WorkerActivity | WorkersExamined | CollectivesSampled | HardwareOfNode
"""What an agent reports to the launcher that watches the job, for as long as an attempt lasts."""


@dataclass(frozen=True)
class ReportOfNode:
    """Coordinator to the agent on the node that serves the rendezvous, and that agent to its launcher.

    Only where each node has its own launcher: that launcher watches the whole job. ``report`` is of one node of the
    round, ``participants`` are the indices of all.
    """

    node_index: Count
    participants: _Participants
    report: Report


@dataclass(frozen=True)
class AgentSignalled:
    """Agent to launcher: another process sent ``signum`` to the agent, which stops unless it is SIGUSR1 or SIGUSR2."""

    signum: SignalNumber


@dataclass(frozen=True)
class Pong:
    """Agent to launcher, in answer to Ping, from the agent's main loop.

    Attributes:
        ping_time_s: that of the Ping.
        time_s: the node's wall clock; 0: not told.
    """

    ping_time_s: Seconds = 0.0
    time_s: Seconds = 0.0


@dataclass(frozen=True)
class Notice:
    """Agent to launcher: a message for the user; ``level`` -1 is always shown, 0 unless --quiet, 1 with --verbose."""

    text: str
    level: Literal[-1, 0, 1] = 0


@dataclass(frozen=True)
class AttemptEnded:
    """Agent to launcher: all workers of an attempt on this node, and all their descendants, have ended.

    ``evidence`` is what the workers knew if a collective failed.
    """

    result: AttemptResult
    evidence: Annotated[tuple[RankEvidence, ...], at_most(MAX_SLOTS_PER_HOST)] = ()


@dataclass(frozen=True)
class AgentFailed:
    """Agent to launcher, before AgentEnded: the agent cannot continue. The fields are those of LaunchError."""

    message: str
    hint: str
    exit_code: Failure


@dataclass(frozen=True)
class AgentEnded:
    """Agent to launcher, last except for log files. SIGKILL has not ended ``unkillable_pids``."""

    unkillable_pids: Pids = ()


TO_AGENT = (
    AgentSpec,
    SweepRun,
    Ping,
    JoinRendezvous,
    AssignNodes,
    NodeDeparts,
    StopWorkers,
    PassSignal,
    ExamineWorkers,
    SampleCollectives,
    AbortHungAttempt,
    OrderToNodes,
    *fault_injection.TO_AGENT,
    log_transfer.GrantLogBytes,
    *debugging.TO_AGENT,
)
FROM_AGENT = (
    AgentReady,
    NodeDetails,
    EndpointOpen,
    AttemptStarted,
    AttemptEnded,
    NeedsRendezvous,
    NodeSilent,
    *fault_injection.FROM_AGENT,
    Output,
    Pong,
    Notice,
    WorkerActivity,
    WorkersExamined,
    CollectivesSampled,
    *health.FROM_AGENT,
    AgentSignalled,
    AgentFailed,
    AgentEnded,
    *log_transfer.FROM_AGENT,
    *debugging.FROM_AGENT,
)
"""What any agent may send."""

FROM_OWN_AGENT = (*FROM_AGENT, RunIdAgreed, FirstRoundFormed, ReportOfNode)
"""What an agent on the launcher's machine may send: it speaks for the launcher's run folder, and for all nodes."""
