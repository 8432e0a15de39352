"""Records of a rendezvous of several nodes: between nodes and coordinator, and between an agent and its member process.

The member passes records between its agent and the rendezvous store, through which coordinator and nodes exchange them.
The tuples at the end list the records that each reader accepts. No behaviour belongs here.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from ddplaunch.config import RendezvousConfig
from ddplaunch.errors import HARDWARE
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import (
    Count,
    Failure,
    Limitless,
    LongText,
    OneLine,
    Port,
    RunId,
    Seconds,
    Size,
    at_most,
)
from ddplaunch.protocol.launcher_agent import AssignNodes, NodeSilent, Notice, OrderToNodes, Report, ReportOfNode
from ddplaunch.protocol.results import Round, RoundEnd, RoundVerdict, Workers

# Node to coordinator.


@dataclass(frozen=True)
class NodeReady:
    """Node to coordinator, before every round: the node is ready to start ``local_world_size`` workers.

    Sent again if ``why_departs`` changes before RoundFormed or a verdict has come. The coordinator ignores it if it has
    formed the round meanwhile: the next one says it.

    Attributes:
        server_address: address at which it connected to the node that serves the rendezvous.
        attempt: the lowest round number that this node has not used in any rendezvous.
        why_departs: why the node should take part only if it is needed, as SLURM takes it out of service; else empty.
            Only where each node has a launcher.
        restart_count: those that this node knows of. The launcher may not when another node begins to serve: the
            verdict that a lost node has sent is still on its way.
        saved: what this node has found that the job would go on from; None: it does not know (``Part.saved``).
        nonce: a random text that the member adds: the records of the coordinator to this node are signed with a key
            that is made of it.
    """

    node_index: Count
    host: OneLine
    local_world_size: Workers
    server_address: OneLine = ""
    attempt: Count = 0
    why_departs: OneLine = ""
    restart_count: Count = 0
    saved: LongText | None = None
    nonce: OneLine = ""


@dataclass(frozen=True)
class WorkersStoreListens:
    """First node of round ``attempt`` to coordinator: address of the workers' store. Answers ListenForWorkersStore.

    The coordinator ignores it if another node has become the first one meanwhile.
    """

    node_index: Count
    attempt: Count
    address: OneLine
    port: Port


@dataclass(frozen=True)
class NodeStopsRound:
    """Node to coordinator, at once: this node stops its workers of round ``attempt``; the other nodes must too.

    A worker failed, the node could not run its workers, or somebody stopped the node.
    """

    node_index: Count
    attempt: Count


@dataclass(frozen=True)
class WorkersEnded(RoundEnd):
    """Node to coordinator, after every round: all workers of the node have ended.

    ``outcome`` is that of this node alone, and ``node_leaves`` is about this node.

    Attributes:
        stopped: somebody stopped this node; the run ends.
        has_unkillable: processes of the node cannot be killed: they may hold its GPUs, so the run ends.
        saved: as in NodeReady, after the round.
    """

    node_index: Count = field(kw_only=True)
    stopped: bool = False
    has_unkillable: bool = False
    saved: LongText | None = None


@dataclass(frozen=True)
class NodeCannotJoin:
    """Node to coordinator, in place of NodeReady, where each node has a launcher: the node takes no part.

    Before the first round, a run that needs the node does not start: the coordinator sends the record to every node
    that has joined.

    Attributes:
        node_index: of the node that serves the rendezvous its index; of another one it is not used, and may be 0.
        reason: what is wrong with the node, with its host.
        exit_code: with which all nodes exit if the run cannot do without this one.
    """

    node_index: Count
    reason: OneLine
    exit_code: Failure = HARDWARE


@dataclass(frozen=True)
class ReportToServer:
    """Node to coordinator, where each node has a launcher: what this node's workers do.

    The coordinator passes it on to the node that serves the rendezvous, whose launcher watches the job.
    """

    node_index: Count
    report: Report


@dataclass(frozen=True)
class NodeLeft:
    """Node to coordinator, last: the node leaves the run, after the verdict or because its agent ends."""

    node_index: Count


# Coordinator to node.


@dataclass(frozen=True)
class WaitingNodes:
    """Coordinator to the waiting nodes, at every change: ``count`` nodes wait, and ``missing`` more are needed.

    ``hosts`` lists their hosts in one text; ``lost``, where each node has a launcher, those of the last round that are
    lost and have not come back.
    """

    hosts: OneLine
    count: Count
    missing: Count
    lost: OneLine = ""


@dataclass(frozen=True)
class NoFreePlace:
    """Coordinator to a spare node: ``hosts`` are all nodes of the run; the node waits until one of them is lost."""

    hosts: Annotated[tuple[OneLine, ...], at_most(1 << 16)]


@dataclass(frozen=True)
class ListenForWorkersStore:
    """Coordinator to the first node of round ``attempt``: bind the socket of the workers' store.

    Answered by WorkersStoreListens. ``address`` is the one at which other nodes have connected to that node; empty if
    none has.
    """

    attempt: Count
    address: OneLine = ""


@dataclass(frozen=True)
class RoundFormed:
    """Coordinator to every node of a round: start the workers.

    Attributes:
        shares_host: another node of the round has a host of the same name.
        max_restarts: limit of the whole run: that of the node that serves the rendezvous.
        joined_time_s: the wall clock of the coordinator's node when this node's NodeReady had arrived; 0: not told,
            because a launcher compares the clocks of all nodes.
        time_s: that clock when this record was sent.
    """

    round: Round
    shares_host: bool = False
    max_restarts: Limitless = 0
    joined_time_s: Seconds = 0.0
    time_s: Seconds = 0.0


@dataclass(frozen=True)
class StopRound:
    """Coordinator to the running nodes: stop the workers of round ``attempt``: a node failed, left or joined."""

    attempt: Count


@dataclass(frozen=True)
class AllNodesLeft:
    """Coordinator to the node that serves the rendezvous: all other nodes have left, so its store may end."""


# Agent to member (MemberSpec), member to agent.


@dataclass(frozen=True, kw_only=True)
class MemberSpec:
    """Agent to member, first: how the node takes part in the rendezvous.

    Attributes:
        rendezvous: completed by the agent: ``server_addresses`` are addresses, ``port`` is the first port to try,
            ``is_server`` is not None. ``node_index`` None requests the next free index.
        node_id: text that no other node has.
        run_id: of this node's launcher; that of the node that serves the rendezvous becomes the run id of all nodes.
        max_restarts: of this node's launcher; on the node that serves the rendezvous that of the whole run.
        one_launcher_leads: one launcher leads all nodes: it has assigned the endpoint and the node indices.
    """

    rendezvous: RendezvousConfig
    node_id: str
    run_id: str
    max_restarts: Limitless
    one_launcher_leads: bool = False


@dataclass(frozen=True)
class MemberReady:
    """Member to agent: the node has joined the rendezvous at ``server_address`` and ``port``, as ``node_index``.

    Attributes:
        run_id: run id of all nodes.
        run_key: text that is equal on all nodes and differs between runs with one run id.
        rank_holder: host of a node with the node rank of this one, which is therefore numbered by arrival; empty if
            there is none, or if another node of the run has reported equal ranks.
    """

    node_index: Count
    server_address: OneLine
    port: Port
    run_id: RunId
    run_key: RunId
    rank_holder: OneLine = ""


@dataclass(frozen=True)
class RendezvousNotFound:
    """Member to agent, once: no rendezvous of this run has been found so far, for ``reason``; the search continues.

    It ends ``limit_s`` after its begin.
    """

    reason: LongText
    limit_s: Seconds


@dataclass(frozen=True)
class RecordsRejected:
    """Member to agent, at most once per heartbeat: ``count`` records so far had no valid signature and were ignored."""

    count: Size


@dataclass(frozen=True)
class RendezvousLost:
    """Member to agent, last: the rendezvous does not answer (any more), or it rejects this node.

    ``refused_hint`` is then what the user can do about it; otherwise empty.
    """

    reason: LongText
    refused_hint: LongText = ""


FROM_NODE = (
    NodeReady,
    WorkersStoreListens,
    NodeStopsRound,
    WorkersEnded,
    NodeLeft,
    NodeCannotJoin,
    ReportToServer,
)
FROM_SERVING_AGENT = (AssignNodes, OrderToNodes)
"""What only the agent of the node that serves the rendezvous may say to the coordinator: it never passes the store."""

TO_NODE = (
    WaitingNodes,
    NoFreePlace,
    ListenForWorkersStore,
    RoundFormed,
    StopRound,
    NodeCannotJoin,
    RoundVerdict,
    AllNodesLeft,
    ReportOfNode,
    OrderToNodes,
)
FROM_MEMBER = (
    MemberReady,
    RendezvousNotFound,
    Notice,
    RecordsRejected,
    RendezvousLost,
    NodeSilent,
    *TO_NODE,
)
