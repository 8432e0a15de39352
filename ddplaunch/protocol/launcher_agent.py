"""Records between launcher and agent, one JSON line each (see ``wire``).

Two groups: launcher to agent, and agent to launcher. Each docstring begins with the sender and the occasion. The tuples
behind them list the records that each reader accepts. At the end is what holds for all records: whose they are, and how
many lines a piece of output counts for. Pure.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.config import RendezvousConfig
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import wire
from ddplaunch.protocol.field_types import (
    Count,
    Failure,
    FolderName,
    LongText,
    OneLine,
    Pids,
    Port,
    RunId,
    Seconds,
    SignalNumber,
    Size,
    at_most,
)
from ddplaunch.protocol.results import AttemptResult, StreamName, Workers
from ddplaunch.protocol.specs import AgentSpec

_MAX_GPUS = 1024
_MAX_EVIDENCE = 16
_MAX_ADDRESSES = 1024

_Participants = Annotated[tuple[Count, ...], at_most(1 << 16)]


# Launcher to agent. The first record is an AgentSpec, a SweepNode or one of ``queries``.
@dataclass(frozen=True)
class SweepNode:
    """Launcher to agent, in place of an AgentSpec, after the loss of a node's agent.

    Kill all processes with ``node_tag`` on this machine except ``excluded_pids``; answered by AgentEnded.
    """

    node_tag: str
    excluded_pids: Pids


@dataclass(frozen=True)
class JoinRendezvous:
    """Launcher to agent: join ``rendezvous``, and leave an earlier one.

    Sent before the first attempt, and each time another rendezvous begins, on the same node or another one.
    """

    rendezvous: RendezvousConfig


@dataclass(frozen=True)
class AssignNodes:
    """Launcher to coordinator, at every change: all nodes of the rounds from now on. Others are lost or were replaced.

    Attributes:
        token: the rendezvous that this concerns. Its node may still have to join it, and then joins with these values.
        assigned: the nodes, in rank order.
        departing: those that leave after the present round if another one follows: none is formed before a further
            AssignNodes, in which none of them departs.
        spares: number of hosts with which the launcher can replace an assigned node.
    """

    token: str
    assigned: tuple[Count, ...]
    departing: tuple[Count, ...] = ()
    spares: Count = 0


@dataclass(frozen=True)
class NodeDeparts:
    """Launcher to agent, where each node has a launcher: SLURM takes this node out of service, for ``reason``.

    Empty: it does not any more.
    """

    reason: OneLine


@dataclass(frozen=True)
class Ping:
    """Launcher to agent, periodically, on other machines and on a partitioned node of a dry run; answered by Pong.

    An agent that gets no Ping for ``lost_after_s`` counts the launcher as lost. ``time_s``: the launcher's wall clock.
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


class Order(wire.Nested):
    """Base of the records of features that the launcher sends to all nodes of an attempt, see OrderToNodes."""

    attempt: int
    direction = "TO_AGENT"

    def for_own_node(self, endpoint: str) -> Order | None:
        """In place of this order, where another node serves the rendezvous: an order for the launcher's own node.

        None: the order goes to all nodes. ``endpoint`` is that of the rendezvous.
        """
        return None


@dataclass(frozen=True)
class OrderToNodes:
    """Launcher to agent, from there to the coordinator, and from there to each agent that runs workers of the attempt.

    Only where each node has a launcher. The launcher that watches the job sends any order. Another one sends only those
    that ``Order.for_own_node`` replaces by an order for its own node.
    """

    order: Order


# Agent to launcher. The last record is AgentEnded, but for what features send after it (``after_end``).


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
        folder: path of the node folder; empty: it keeps no files. Only this node may be asked for a file in it.
    """

    cpus: Count
    gpus: Annotated[tuple[OneLine, ...], at_most(_MAX_GPUS)]
    python: OneLine
    torch: OneLine
    folder: LongText = ""


@dataclass(frozen=True)
class EndpointOpen:
    """Agent to launcher, from the node that must serve the store of rendezvous ``token``: it listens at ``port``.

    ``addresses`` are the node's, best first. The launcher then sends JoinRendezvous to the other nodes.
    """

    token: OneLine
    addresses: Annotated[tuple[OneLine, ...], at_most(_MAX_ADDRESSES)]
    port: Port


@dataclass(frozen=True)
class NeedsRendezvous:
    """Agent to launcher: this node has lost the rendezvous ``token``, stops its workers and needs JoinRendezvous."""

    token: OneLine
    reason: LongText


@dataclass(frozen=True)
class NodeSilent:
    """Agent of the node that serves the rendezvous ``token`` to launcher: node ``node_index`` is silent.

    It has sent no heartbeat for ``silent_s``, as the agent knows from its member. The launcher may have removed that
    node already.
    """

    token: OneLine
    node_index: Count
    silent_s: Seconds


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

    With ``runs`` they are whole lines of both streams, of each in turn; ``stream`` is the first. A run is as many bytes
    of one stream; ``runs_of`` in ``output_runs.py`` takes them apart.

    ``on_terminal``: the agent has shown them on the user's terminal, and they are for console.log only.
    """

    host: OneLine
    rank: Count
    local_rank: Count
    stream: StreamName
    nbytes: wire.ChunkSize
    lost_lines: Size = 0
    attempt: Count = 0
    goes_on: bool = False
    on_terminal: bool = False
    runs: Annotated[tuple[Count, ...], at_most(1 << 16)] = ()


class Report(wire.Nested):
    """Base of features' records to the launcher that watches the job. Evidence goes to the launcher of the node."""

    attempt: int
    direction = "FROM_AGENT"


@dataclass(frozen=True)
class ReportOfNode:
    """Coordinator to the agent on the node that serves the rendezvous, and that agent to its launcher.

    Only where each node has a launcher: that launcher watches the job. ``report`` is of one node of the round,
    ``participants`` are the indices of all.
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

    text: LongText
    level: Literal[-1, 0, 1] = 0


@dataclass(frozen=True)
class AttemptEnded:
    """Agent to launcher: all workers of an attempt on this node, and all their descendants, have ended.

    ``evidence`` is what features add to it.
    """

    result: AttemptResult
    evidence: Annotated[tuple[Report, ...], at_most(_MAX_EVIDENCE)] = ()


@dataclass(frozen=True)
class AgentFailed:
    """Agent to launcher, before AgentEnded: the agent cannot continue. The fields are those of LaunchError."""

    message: LongText
    hint: LongText
    exit_code: Failure


@dataclass(frozen=True)
class AgentEnded:
    """Agent to launcher, last except for log files. SIGKILL has not ended ``unkillable_pids``."""

    unkillable_pids: Pids = ()


TO_AGENT = (
    AgentSpec,
    SweepNode,
    Ping,
    JoinRendezvous,
    AssignNodes,
    NodeDeparts,
    StopWorkers,
    PassSignal,
    OrderToNodes,
)
FROM_AGENT = (
    AgentReady,
    NodeDetails,
    EndpointOpen,
    AttemptStarted,
    AttemptEnded,
    NeedsRendezvous,
    NodeSilent,
    Output,
    Pong,
    Notice,
    AgentSignalled,
    AgentFailed,
    AgentEnded,
)
"""What any agent may send, besides the records of features."""

FROM_OWN_AGENT = (*FROM_AGENT, RunIdAgreed, FirstRoundFormed, ReportOfNode)
"""What an agent on the launcher's machine may send: it speaks for the launcher's run folder, and for all nodes."""


class OfRanks:
    """Base of the records in which a node names ranks: all of them must be its own. A list names none of them twice."""

    attempt: int

    @property
    def named_ranks(self) -> list[int] | set[int]:
        """The ranks that the record is about."""
        raise NotImplementedError


def with_senders_host(host: str, record: Any) -> Any:
    """``record`` with each ``host`` in it set to that of the node that sent it: a node cannot speak for another.

    ``AttemptResult.cause`` stays: the first failure may be on another node. So does a ReportOfNode, of another node.
    """
    if isinstance(record, ReportOfNode):
        return record
    if hasattr(record, "host"):
        return record if record.host == host else replace(record, host=host)
    if isinstance(record, tuple):
        return tuple(with_senders_host(host, each) for each in record)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "cause"}
    changed = {name: own for name, value in values.items() if (own := with_senders_host(host, value)) != value}
    return replace(record, **changed) if changed else record
