"""The coordinator of a run: forms rounds, in which each node has its ranks, stops them, and gives the verdict on each.

Runs in the agent of a single node; with several nodes, in the member process of the node that serves the rendezvous.
That passes every record of a node to ``Coordinator.receive`` and sends the records that it returns. Pure: uses no clock
and no store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import accumulate
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold
from ddplaunch.protocol.launcher_agent import AssignNodes, OrderToNodes, ReportOfNode, with_senders_host
from ddplaunch.protocol.rendezvous import (
    AllNodesLeft,
    ListenForWorkersStore,
    NodeCannotJoin,
    NodeLeft,
    NodeReady,
    NodeStopsRound,
    NoFreePlace,
    ReportToServer,
    RoundFormed,
    StopRound,
    WaitingNodes,
    WorkersEnded,
    WorkersStoreListens,
)
from ddplaunch.protocol.results import Round, RoundVerdict
from ddplaunch.rounds.verdicts import RoundReports, decide, last_verdict, why_too_few_nodes
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.rounds.restarts import Restarts

_MAX_HOSTS_CHARACTERS = 1000
"""Limit of a list of hosts in a record; numbered hosts fold to a few characters."""


class Phase(Enum):
    """State of the current round."""

    WAITING = auto()
    """Nodes join; the next round has not been formed."""
    STARTING = auto()
    """The participants are chosen; the first of them binds the socket of the workers' store."""
    RUNNING = auto()
    STOPPING = auto()
    """StopRound was sent to all nodes; some still run."""
    FINISHED = auto()
    """The run has ended; nodes leave."""


Outgoing = tuple[int, object]
"""The index of a node, and a record to send to it."""


class Coordinator:
    """The state of a run's rounds.

    Attributes:
        server_index: index of the node that serves the rendezvous, on which this process runs.
        restarts: those of the whole run; this counts them.
        assigned: node indices in rank order, where one launcher leads all nodes; empty where each node has a launcher.
        attempt: number of the current round.
        departing: assigned nodes that leave if another round follows the current one. No round is formed with them: the
            launcher first assigns others, or says that they stay.
        spares: number of hosts on which the launcher can still start a node, to replace an assigned one.
        participants: node indices in rank order. A node keeps its position in all rounds; a node that replaces a
            lost node gets that node's position.
    """

    def __init__(
        self,
        server_index: int,
        min_nodes: int,
        max_nodes: int,
        restarts: Restarts,
        assigned: tuple[int, ...] = (),
        *,
        attempt: int = 0,
        departing: tuple[int, ...] = (),
        spares: int = 0,
    ) -> None:
        self.server_index, self.min_nodes, self.max_nodes = server_index, min_nodes, max_nodes
        self.restarts, self.assigned, self.attempt = restarts, assigned, attempt
        self.departing, self.spares = departing, spares
        self.phase = Phase.WAITING
        self.participants: list[int] = []
        self._waiting: dict[int, NodeReady] = {}
        """The nodes that can start the next round."""
        self._hosts: dict[int, str] = {}
        """By node: the host of every node that has ever joined."""
        self._running: set[int] = set()
        """The participants that have not reported the end of the round."""
        self._reports = RoundReports()
        self._absent: set[int] = set()
        """The nodes that have left or were lost, and have not joined again."""
        self._avoided: set[str] = set()
        """Hosts of nodes that must not be used again."""
        self._not_left: set[int] = set()
        """When FINISHED: the nodes that have not left. The one that serves the rendezvous waits for them."""
        self._cannot_start: NodeCannotJoin | None = None
        """Why the run ends before its first round; None if it does not."""
        self._untold_count = 0
        """If the run cannot start: the number of nodes that have not joined, and so do not know of it."""

    def receive(self, record: object) -> list[Outgoing]:
        """Process one record of a node and return the records to send."""
        match record:
            case NodeReady(node_index=index) if index not in self._running:
                return self._on_joined(record)
            case WorkersStoreListens(node_index=index, attempt=attempt) if self._awaits_store(index, attempt):
                return self._start(record)
            case NodeStopsRound(node_index=index, attempt=attempt) if self._is_running(index, attempt):
                self._reports.stopping_nodes.append(index)
                return self._stop("")
            case WorkersEnded(node_index=index, attempt=attempt) if self._is_running(index, attempt):
                return self._on_ended(record)
            case NodeLeft(node_index=index):
                return self.on_gone(index, "has left the run")
            case NodeCannotJoin():
                return self._on_cannot_join(record)
            case AssignNodes():
                return self._assign(record)
            case ReportToServer(node_index=index, report=report) if self._is_running(index, report.attempt):
                own = with_senders_host(self._hosts[index], report)
                return [(self.server_index, ReportOfNode(index, tuple(self.participants), own))]
            case OrderToNodes(order=order) if order.attempt == self.attempt:
                return [(index, record) for index in self.participants if index in self._running]
        return []

    def waiting_nodes(self) -> list[Outgoing]:
        """A WaitingNodes for every waiting node. Call at intervals: a call per arrival would make n^2 records."""
        if self.phase is not Phase.WAITING:
            return []
        here = [joined.host for index, joined in self._waiting.items() if self.may_take_part(index)]
        gone = [] if self.assigned else [self._hosts[index] for index in self.participants if index in self._absent]
        come = [self._hosts[index] for index in self._waiting if index not in self.participants]
        missed = (Counter(gone) - Counter(come)).keys() - self._avoided
        needed, count = len(self.assigned) or self.min_nodes, len(here)
        hosts, lost_hosts = (quote(fold(names), _MAX_HOSTS_CHARACTERS) for names in (here, missed))
        waiting = WaitingNodes(hosts, count, max(0, needed - count), lost_hosts)
        return [(index, waiting) for index in self._waiting]

    def last_call_expired(self) -> list[Outgoing]:
        """Start a round with the waiting nodes, if there are enough."""
        return self._form() if self.has_enough else []

    @property
    def has_enough(self) -> bool:
        """Whether ``min_nodes`` nodes wait, so that the last-call time runs."""
        return self.phase is Phase.WAITING and not self.assigned and len(self._waiting) >= self.min_nodes

    def may_take_part(self, node_index: int) -> bool:
        """Whether a round may have this node. One that its launcher does not name (any more, or yet) may not."""
        return not self.assigned or node_index in self.assigned

    @property
    def _is_complete(self) -> bool:
        if self.assigned:
            has_all = len(self._waiting) >= len(self.assigned) and self._waiting.keys() >= set(self.assigned)
            return has_all and set(self.departing).isdisjoint(self.assigned)
        return len(self._waiting) >= self.max_nodes and self._waiting.keys() >= set(self.participants) - self._absent

    def _is_running(self, node_index: int, attempt: int) -> bool:
        return attempt == self.attempt and node_index in self._running

    def _awaits_store(self, node_index: int, attempt: int) -> bool:
        return self.phase is Phase.STARTING and (node_index, attempt) == (self.participants[0], self.attempt)

    # Waiting for nodes, and the start of a round.

    def _on_joined(self, record: NodeReady) -> list[Outgoing]:
        index = record.node_index
        self._waiting[index], self._hosts[index] = record, record.host
        self._absent.discard(index)
        if self._cannot_start:
            self._untold_count -= 1
            self._not_left |= {index} - {self.server_index}
            return [(index, self._cannot_start), *self._all_left()]
        if self.phase is Phase.FINISHED:
            return [(index, RoundVerdict(self.attempt, "failed", reason="the run had ended when this node joined"))]
        if record.host in self._avoided:
            del self._waiting[index]
            if self.assigned:  # The launcher removes the node; until then no round is complete.
                return []
            return [(index, RoundVerdict(self.attempt, "failed", reason=f"this run does not use {record.host} again"))]
        if self.phase is Phase.WAITING:
            return self._form_if_complete()
        has_room = index in self.assigned if self.assigned else len(self.participants) < self.max_nodes
        has_room = has_room and not record.why_departs
        if self.phase is Phase.RUNNING and has_room:
            self._reports.node_joined = True
            return self._stop(f"{record.host} joins")
        if not self.assigned and index not in self.participants:
            if not has_room:
                return [self._no_place(index)]
            if self.phase is Phase.STARTING:  # No worker has started: the node can still take part.
                self.participants.append(index)
        return []

    # A node that has failed before it joined, or whose hardware is not sound, takes no part.

    def _on_cannot_join(self, record: NodeCannotJoin) -> list[Outgoing]:
        """Before the first round, a run that cannot do without the node ends, and all nodes are told."""
        if self._cannot_start:
            self._untold_count -= 1
            return self._all_left()
        is_needed = self.min_nodes == self.max_nodes or record.node_index == self.server_index
        if not is_needed or self.participants or self.assigned or self.phase is not Phase.WAITING:
            return []
        self._cannot_start, self.phase = record, Phase.FINISHED
        self._not_left = set(self._waiting) - {self.server_index}
        self._untold_count = self.min_nodes - 1 - len(self._waiting)
        return [*((index, self._cannot_start) for index in self._waiting), *self._all_left()]

    def _all_left(self) -> list[Outgoing]:
        """After the end: whether the node that serves the rendezvous may go."""
        return [(self.server_index, AllNodesLeft())] if not self._not_left and self._untold_count <= 0 else []

    def _form_if_complete(self) -> list[Outgoing]:
        return self._form() if self.phase is Phase.WAITING and self._is_complete else []

    def _assign(self, record: AssignNodes) -> list[Outgoing]:
        kept = set(record.assigned)
        removed = [index for index in self.assigned if index not in kept]
        self.assigned = tuple(dict.fromkeys(record.assigned))
        self.departing, self.spares = record.departing, record.spares
        return [*(sent for index in removed for sent in self.on_gone(index)), *self._form_if_complete()]

    def _form(self) -> list[Outgoing]:
        self.participants = list(self.assigned) or self._chosen()
        self.phase = Phase.STARTING
        joined = [self._waiting[index] for index in self.participants]
        self.restarts.on_forming(self.attempt, joined[0])
        self.attempt = max(self.attempt, *(node.attempt for node in joined))
        self.restarts.restart_count = max(self.restarts.restart_count, *(node.restart_count for node in joined))
        departing = [i for i, node in self._waiting.items() if node.why_departs and i not in self.participants]
        listen = (self.participants[0], ListenForWorkersStore(self.attempt, self._first_address()))
        return [listen, *map(self._no_place, departing)]

    def _chosen(self) -> list[int]:
        """The nodes of the next round where nodes join by themselves; of those that depart only as many as it needs."""
        staying = [index for index, node in self._waiting.items() if not node.why_departs]
        departing = sorted(self._waiting.keys() - staying, key=lambda index: (index not in self.participants, index))
        needed = departing[: max(0, self.min_nodes - len(staying))]
        return _in_rank_order(self.participants, [*staying, *needed])[: self.max_nodes]

    def _no_place(self, node_index: int) -> Outgoing:
        return (node_index, NoFreePlace(tuple(self._hosts[other] for other in self.participants)))

    def _first_address(self) -> str:
        """Address at which most other nodes have connected to the first node.

        Empty if that node does not serve the rendezvous store: the other nodes connect to the serving node only.
        """
        if self.participants[0] != self.server_index:
            return ""
        addresses = Counter(self._waiting[index].server_address for index in self.participants[1:])
        return addresses.most_common(1)[0][0] if addresses else ""

    def _start(self, store: WorkersStoreListens) -> list[Outgoing]:
        sizes = tuple(self._waiting.pop(index).local_world_size for index in self.participants)
        self._running, self._reports, self.phase = set(self.participants), RoundReports(), Phase.RUNNING
        rounds = _rounds_by_node(self.attempt, self.restarts, sizes, store)
        nodes = Counter(self._hosts[index] for index in self.participants)
        formed = zip(self.participants, rounds, strict=True)
        return [(i, RoundFormed(round_, nodes[self._hosts[i]] > 1, self.restarts.max_restarts)) for i, round_ in formed]

    # The end of a round.

    def _stop(self, reason: str) -> list[Outgoing]:
        if self.phase is not Phase.RUNNING:
            return []
        self.phase, self._reports.reason = Phase.STOPPING, reason
        return [(index, StopRound(self.attempt)) for index in self.participants if index in self._running]

    def _on_ended(self, record: WorkersEnded) -> list[Outgoing]:
        self._running.discard(record.node_index)
        cause = record.cause and with_senders_host(self._hosts[record.node_index], record.cause)
        self._reports.ended_nodes.append(replace(record, cause=cause))
        self._reports.saved = record.saved if record.node_index == self.participants[0] else self._reports.saved
        if record.stopped and not self._reports.why_node_stopped:
            self._reports.why_node_stopped = record.reason or f"{self._hosts[record.node_index]} was stopped"
        # A launcher that leads all nodes stops all if it stops one: an order of ours might be faster than its signal.
        is_stopped_alone = record.stopped and (record.reason or not self.assigned)
        sent = self._stop("") if record.outcome == "failed" or is_stopped_alone else []
        return [*sent, *self._finish_round()]

    def on_gone(self, node_index: int, what: str = "is lost") -> list[Outgoing]:
        """The node leaves, is silent, or was removed by the launcher of all nodes, which does not name it any more."""
        if self.phase is Phase.FINISHED:
            self._not_left.discard(node_index)
            return self._all_left()
        self._waiting.pop(node_index, None)
        self._absent.add(node_index)
        if self.phase is Phase.STARTING and node_index in self.participants:
            self.phase = Phase.WAITING
        if node_index not in self.participants or self.phase is Phase.WAITING:
            return self._form_if_complete()
        self._running.discard(node_index)
        self._reports.node_gone = True
        reason = f"{self._hosts[node_index]} (node {self.participants.index(node_index)}) {what}"
        sent = self._stop(reason)
        self._reports.reason = self._reports.reason or reason
        return [*sent, *self._finish_round()]

    def _finish_round(self) -> list[Outgoing]:
        """Once no node runs: the verdict for the participants and, after the last round, also for the waiting nodes."""
        if self._running or self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        leaving = self._not_used_again()
        verdict = decide(self.attempt, self._reports, self.restarts, self._why_too_few(leaving))
        if verdict.attempt_follows:
            self.phase, self.attempt = Phase.WAITING, self.attempt + 1
            last = self._let_leave(leaving, verdict)
            told = self._tell(verdict, dict.fromkeys([*self.participants, *last]), last)
            return [*told, *self._form_if_complete()]  # Of nodes that waited, if no participant is left.
        self.phase = Phase.FINISHED
        receivers = dict.fromkeys([*self.participants, *self._waiting])
        self._not_left = receivers.keys() - self._absent - {self.server_index}
        return [*self._tell(verdict, receivers, {}), *self._all_left()]

    def _tell(self, verdict: RoundVerdict, nodes: Iterable[int], last: Mapping[int, RoundVerdict]) -> list[Outgoing]:
        # The cause can be large, and a launcher that leads all nodes needs only one copy.
        brief = replace(verdict, cause=None) if self.assigned else verdict
        return [(i, last.get(i) or (verdict if i == self.server_index else brief)) for i in nodes]

    # Nodes that are not used again.

    def _not_used_again(self) -> set[int]:
        """The nodes on the hosts of nodes that must not be used again; those that wait included."""
        hosts = {self._hosts[index] for index in self._reports.leaving}
        return {index for index in (*self.participants, *self._waiting) if self._hosts[index] in hosts}

    def _why_too_few(self, leaving: set[int]) -> str:
        """Why the nodes that are not lost or ``leaving`` form no further round; empty if they can.

        In place of a lost node of an elastic run another one may join. Where one launcher leads all nodes,
        that launcher, not the coordinator, ends the run if it cannot replace a lost node.
        """
        others_may_come = bool(self.assigned) or self.min_nodes < self.max_nodes
        if not leaving and (others_may_come or not self._reports.node_gone):
            return ""
        reason, here = self._reports.why_one_leaves, set(self.assigned) or {*self.participants, *self._waiting}
        remaining = len(here - self._absent - leaving) + self.spares
        ends_rendezvous = self.server_index in leaving and not self.assigned
        return why_too_few_nodes(remaining, self.min_nodes, reason, ends_rendezvous=ends_rendezvous)

    def _let_leave(self, leaving: set[int], verdict: RoundVerdict) -> dict[int, RoundVerdict]:
        """Exclude the nodes that leave from all further rounds. Returns their last verdicts.

        A launcher that leads all nodes replaces and stops them itself.
        """
        self._avoided |= {self._hosts[index] for index in leaving}
        for index in leaving:
            self._waiting.pop(index, None)
        if self.assigned:
            return {}
        self._absent |= leaving
        return dict.fromkeys(sorted(leaving), last_verdict(verdict, self._reports.why_one_leaves))


def _in_rank_order(previous: Sequence[int], waiting: Iterable[int]) -> list[int]:
    """The waiting nodes: those of the previous round keep their positions, new ones get those of missing nodes."""
    present = set(waiting)
    newcomers = sorted(present.difference(previous))
    order = []
    for index in previous:
        if index in present:
            order.append(index)
        elif newcomers:
            order.append(newcomers.pop(0))
    return [*order, *newcomers]


def _rounds_by_node(
    attempt: int, restarts: Restarts, sizes: Sequence[int], store: WorkersStoreListens
) -> Iterator[Round]:
    """The Round of each node, in rank order; ``sizes`` are the nodes' numbers of workers."""
    world_size = sum(sizes)
    for node_rank, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        yield Round(
            attempt=attempt,
            restart_count=restarts.restart_count,
            saved=restarts.saved,
            node_rank=node_rank,
            nnodes=len(sizes),
            first_rank=end - size,
            local_world_size=size,
            world_size=world_size,
            master_addr=store.address,
            master_port=store.port,
        )
