"""The nodes of a run: starts their agents, holds each node's state, replaces a lost node by a spare.

Runs in the launcher, in the main thread. Holds the participants and their rendezvous. ``Run`` decides how the loss of
a node affects the run.
"""

from __future__ import annotations

import enum
import signal
import time
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, Level
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.rendezvous_manager import RendezvousManager
from ddplaunch.protocol.launcher_agent import AgentEnded, NodeDetails, StopWorkers
from ddplaunch.transport.failures import UNREACHABLE, HostFailure, failures_table
from ddplaunch.transport.handle import AgentHandle, ChannelClosed, NoAgent, Transport
from ddplaunch.transport.remote_start import NodeFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from ddplaunch.config import RendezvousConfig
    from ddplaunch.launcher.attempts import Attempts
    from ddplaunch.protocol.results import NodeLostRendezvous
    from ddplaunch.protocol.specs import AgentSpec


SWEEP_S = 20.0
"""Time limit for the sweep of a lost node, in seconds."""

_NEVER = float("inf")


class NodeState(enum.Enum):
    """The life of a node.

    Transitions::

        CONNECTING   -> RUNNING | DONE | SWEEPING | LOST
        RUNNING      -> ENDING | DONE | SWEEPING | LOST
        ENDING       -> SENDING_LOGS | DONE | SWEEPING | LOST
        SENDING_LOGS -> DONE
        SWEEPING     -> LOST

    DONE and LOST are final. A node whose sweep cannot be started goes to LOST at once.
    """

    CONNECTING = enum.auto()
    """The launcher is connecting to the host; the agent does not accept records yet."""
    RUNNING = enum.auto()
    """The agent accepts records."""
    ENDING = enum.auto()
    """AgentEnded has arrived: the node's workers have ended, and the agent's channel closes next."""
    SENDING_LOGS = enum.auto()
    """As ENDING, but the agent sends its log files before the channel closes."""
    DONE = enum.auto()
    """The agent has ended, or its host cannot be used."""
    SWEEPING = enum.auto()
    """The agent is lost; another agent on its host kills the node's remaining processes."""
    LOST = enum.auto()
    """The agent is lost, and no sweep is in progress."""

    @property
    def has_agent(self) -> bool:
        """Whether the agent accepts records."""
        return self in (NodeState.RUNNING, NodeState.ENDING, NodeState.SENDING_LOGS)

    @property
    def is_lost(self) -> bool:
        """Whether the agent is lost, during or after the sweep."""
        return self in (NodeState.SWEEPING, NodeState.LOST)

    @property
    def is_final(self) -> bool:
        """Whether the launcher no longer waits for this node."""
        return self in (NodeState.DONE, NodeState.LOST)


@dataclass
class Node:
    """A host's part in a run.

    Attributes:
        unkillable_pids: processes on the host that survived SIGKILL; None until the agent or a sweep has reported.
        sweep: handle of the agent that sweeps the host; None unless the state is SWEEPING.
        sweep_deadline: time limit of the sweep, by ``time.monotonic()``.
        facts: facts about a remote host; None for a local node, and until the agent is connected.
        workers: number of workers; 0 until the agent is ready.
        details: what the workers use, for the report; None until the agent has sent it.
        lost_reason: how the node was lost, if that was before the end of the run, or why its host was not reached; else
            empty.
    """

    index: int
    host: str
    handle: AgentHandle
    state: NodeState = NodeState.CONNECTING
    unkillable_pids: tuple[int, ...] | None = None
    sweep: AgentHandle | None = None
    sweep_deadline: float = _NEVER
    facts: NodeFacts | None = None
    workers: int = 0
    details: NodeDetails | None = None
    lost_reason: str = ""


class Nodes:
    """All nodes of a run.

    Attributes:
        all: every node that was started, by index.
        participants: indices of the nodes that take part, in the order of their ranks; a spare gets the position of
            the node that it replaces.
        rendezvous: the rendezvous of the participants; None where the launcher does not assign the rendezvous.
    """

    def __init__(
        self,
        transport: Transport,
        spec: Callable[[int, Mapping[str, int]], AgentSpec],
        min_nodes: int,
        max_nodes: int,
        rendezvous: RendezvousConfig | None,
        attempts: Attempts,
        show: Callable[[str, int], None],
    ) -> None:
        """``rendezvous`` is the rendezvous of the run; None where the launcher does not assign it.

        ``spec`` builds the AgentSpec of node ``index``, given the descriptors that its agent has inherited.
        """
        self._transport, self._spec, self._attempts, self._show = transport, spec, attempts, show
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self.all: list[Node] = []
        self.participants: list[int] = []
        self.rendezvous = RendezvousManager(rendezvous, lambda: self.spares) if rendezvous else None
        self._passed_over: set[int] = set()
        self._maybe_connecting: list[Node] = []
        self._maybe_unfinished: list[Node] = []
        self._failures: list[HostFailure] = []
        self._shown_failures = 0
        self._sweep_deadline = _NEVER

    @property
    def connected(self) -> Iterator[Node]:
        """The nodes whose agents accept records."""
        return (node for node in self.all if node.state.has_agent)

    @property
    def lost(self) -> list[Node]:
        """The nodes whose agents are lost."""
        return [node for node in self.all if node.state.is_lost]

    @property
    def lost_reasons(self) -> dict[str, str]:
        """By host: how a node was lost, or why its host was not reached."""
        return {node.host: node.lost_reason for node in self.all if node.lost_reason}

    @property
    def all_finished(self) -> bool:
        """Whether all agents and all sweeps have ended."""
        return _all_passed(self._maybe_unfinished, lambda node: node.state.is_final)

    @property
    def any_connecting(self) -> bool:
        """Whether the launcher is still connecting to a node."""
        return not _all_passed(self._maybe_connecting, lambda node: node.state is not NodeState.CONNECTING)

    @property
    def unkillable_pids(self) -> tuple[int, ...]:
        """Processes that survived SIGKILL, on all nodes that have reported."""
        return tuple(sorted(pid for node in self.all for pid in node.unkillable_pids or ()))

    # Start.

    def start(self) -> Iterator[Node]:
        """Start the agents of the first nodes, and yield each node; the other hosts are spares.

        ``on_changed`` must follow. The caller may stop earlier, when the run is stopped.

        Raises:
            LaunchError: an agent cannot be started.
        """
        for _ in range(min(self._max_nodes, len(self.hosts))):
            node = self._start_next()
            self.participants.append(node.index)
            yield node

    def _start_next(self) -> Node:
        index = len(self.all)
        node = Node(index, self.hosts[index], self._transport.start(index))
        for nodes in (self.all, self._maybe_connecting, self._maybe_unfinished):
            nodes.append(node)
        if not self._transport.is_remote:
            self.on_agent_connected(node)
        return node

    @property
    def hosts(self) -> Sequence[str]:
        """Display names of all nodes, the spares last."""
        return self._transport.node_names

    def pass_over(self, hosts: Collection[str]) -> None:
        """No spare on one of these is started; replaces an earlier call."""
        self._passed_over = {index for index in range(len(self.all), len(self.hosts)) if self.hosts[index] in hosts}

    def _skip_passed_over(self) -> None:
        while len(self.all) in self._passed_over:
            index = len(self.all)
            self.all.append(Node(index, self.hosts[index], NoAgent(), NodeState.DONE, unkillable_pids=()))
            self._show(f"{self.hosts[index]} is not chosen: SLURM takes it out of service", Level.NORMAL)

    def on_agent_connected(self, node: Node, facts: NodeFacts | None = None) -> None:
        """The agent accepts records: send its AgentSpec."""
        node.state, node.facts = NodeState.RUNNING, facts
        node.handle.send(self._spec(node.index, node.handle.inherited_fds))

    def stop_connecting(self) -> None:
        """Cancel all connections that are not established yet."""
        for node in self.all:
            if node.state is NodeState.CONNECTING:
                node.state, node.unkillable_pids = NodeState.DONE, ()
                node.handle.end_input()

    # The rendezvous.

    def on_changed(self) -> None:
        """Once no node is connecting: check the participants, and announce their rendezvous if they have one.

        To be called after every change of nodes.

        Raises:
            LaunchError: too few hosts can be used.
        """
        if self.any_connecting:
            return
        for node, failure in self._torch_mismatches():
            node.handle.end_input()
            self.exclude(node, failure)  # Calls this method again, for the remaining nodes.
            return
        if len(self.participants) < self._min_nodes:
            raise LaunchError(f"not enough hosts can be used\n{failures_table(self._failures)}", "", NODE_NOT_READY)
        self._show_failures()
        if self.rendezvous:
            self.rendezvous.announce(self.participants, self._attempts, self.send_to)

    def _show_failures(self) -> None:
        for failure in self._failures[self._shown_failures :]:
            self._show(f"{failure.host} cannot be used: {failure.message}; the job runs without it", Level.ALWAYS)
        self._shown_failures = len(self._failures)

    def _torch_mismatches(self) -> list[tuple[Node, HostFailure]]:
        """The participants whose version of torch differs from the most frequent one."""
        by_host = {node.host: (node, node.facts) for node in map(self.all.__getitem__, self.participants) if node.facts}
        if len(by_host) < 2:
            return []
        from ddplaunch.transport.remote_start import check_torch_versions

        failures = check_torch_versions({host: facts for host, (_, facts) in by_host.items() if facts})
        return [(by_host[failure.host][0], failure) for failure in failures]

    def relocate_rendezvous(self, node: Node, event: NodeLostRendezvous) -> None:
        """A participant cannot reach the rendezvous any more: start another one, on another node.

        Raises:
            LaunchError: too many rendezvous have failed one after the other.
        """
        index = node.index if event.silent is None else event.silent
        if self.rendezvous and event.token == self.rendezvous.token and index in self.participants:
            host = self.all[index].host
            self._show(f"{host} has lost the rendezvous ({event.reason}); the nodes start a new one", Level.NORMAL)
            self.rendezvous.relocate(host, event.reason)
            self.on_changed()

    def send(self, record: object) -> None:
        """Send ``record`` to all agents."""
        for node in self.connected:
            node.handle.send(record)

    def send_to(self, index: int, record: object) -> None:
        """Send ``record`` to the agent of one node."""
        self.all[index].handle.send(record)

    # Lost and unusable nodes.

    def can_continue_without(self, node: Node) -> bool:
        """Whether the run has enough nodes, spares included, if the participant ``node`` is removed."""
        remaining, needed = self.remaining_without(node)
        return bool(self.rendezvous) and node.index in self.participants and remaining >= needed

    @property
    def spares(self) -> int:
        """Number of hosts on which a node can still be started."""
        return len(set(range(len(self.all), len(self.hosts))) - self._passed_over)

    def remaining_without(self, *nodes: Node) -> tuple[int, int]:
        """How many nodes, spares included, the run has without ``nodes``, and how many it needs."""
        participants = set(self.participants) - {node.index for node in nodes}
        return len(participants) + self.spares, self._min_nodes

    def exclude(self, node: Node, failure: HostFailure) -> None:
        """The host of ``node`` cannot be used: replace the node.

        Raises:
            LaunchError: too few other hosts can be used.
        """
        self._failures.append(failure)
        if failure.cause in UNREACHABLE:
            node.lost_reason = f"{node.host} could not be reached: {failure.message}"
        node.state, node.unkillable_pids = NodeState.DONE, ()
        self.replace(node)

    def replace(self, node: Node) -> None:
        """Start a spare in the position of ``node``; without a spare the world shrinks.

        Raises:
            LaunchError: too few hosts can be used.
        """
        position = self.participants.index(node.index)
        self._skip_passed_over()
        if len(self.all) < len(self.hosts):
            self.participants[position : position + 1] = [self._start_next().index]
            self._show(f"{self.all[-1].host} replaces {node.host}", Level.NORMAL)
        else:
            del self.participants[position]
        if self.rendezvous and len(self.participants) >= self._min_nodes:
            self.rendezvous.remove_node(node.index, self.participants, self.send_to)
        self.on_changed()

    def retire(self, node: Node) -> None:
        """No further attempt uses ``node``, whose workers have ended: replace it. Its agent ends, and sends its logs.

        Raises:
            LaunchError: too few hosts can be used.
        """
        self.replace(node)
        node.handle.send(StopWorkers(signal.SIGTERM, 0.0))

    def remove(self, node: Node) -> None:
        """Remove ``node`` from the participants, without replacement."""
        self.participants.remove(node.index)
        if self.rendezvous and self.participants:
            self.rendezvous.remove_node(node.index, self.participants, self.send_to)

    # The sweep of lost nodes.

    def sweep(self, node: Node) -> None:
        """The agent of ``node`` is lost: start to kill the node's remaining processes."""
        node.sweep = self._transport.sweep(node.index)
        node.state = NodeState.SWEEPING if node.sweep else NodeState.LOST
        node.sweep_deadline = time.monotonic() + SWEEP_S
        self._sweep_deadline = min(self._sweep_deadline, node.sweep_deadline)

    def on_sweep_event(self, node: Node, event: object) -> None:
        """Handle an event of the agent that sweeps; ChannelClosed or HostFailure is the last one."""
        if isinstance(event, AgentEnded):
            node.unkillable_pids = event.unkillable_pids
        elif isinstance(event, (ChannelClosed, HostFailure)):
            _end_sweep(node)

    def run_due(self, now: float) -> float:
        """End the sweeps that have reached their deadline. Returns the next deadline."""
        if now >= self._sweep_deadline:
            sweeping = [node for node in self.all if node.sweep]
            for node in sweeping:
                if node.sweep and now >= node.sweep_deadline:
                    node.sweep.kill()
                    _end_sweep(node)
            self._sweep_deadline = min((node.sweep_deadline for node in sweeping if node.sweep), default=_NEVER)
        return self._sweep_deadline

    # The end.

    def close(self, timeout_s: float) -> None:
        """End all agents; returns when they have exited. Local ones are killed after ``timeout_s``."""
        for node in self.all:
            node.handle.end_input()
        for node in self.all:
            for handle in (node.handle, node.sweep):
                if handle:
                    handle.close(timeout_s)
        self._transport.close()


def _end_sweep(node: Node) -> None:
    if node.sweep:
        node.sweep.close()
        node.sweep, node.state = None, NodeState.LOST


def _all_passed(nodes: list[Node], passed: Callable[[Node], bool]) -> bool:
    """Whether all ``nodes`` have ``passed`` a state for good; removes such nodes from the end of the list.

    Called after every event: with thousands of nodes, a check of all of them each time would take most of the CPU time.
    """
    while nodes and passed(nodes[-1]):
        nodes.pop()
    return not nodes
