"""The nodes of a run: starts their agents, holds each node's state, sweeps the hosts of lost nodes.

Runs in the launcher, in the main thread. Which nodes take part is the subject of ``participants``.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AgentEnded, NodeDetails
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import AgentHandle, ChannelClosed, NoAgent, NodeFacts, Transport

if TYPE_CHECKING:
    from ddplaunch.protocol.specs import AgentSpec


SWEEP_S = 20.0
"""Time limit for the sweep of a lost node, in seconds."""


class NodeState(enum.Enum):
    """The life of a node.

    Transitions::

        CONNECTING   -> RUNNING | DONE | SWEEPING | LOST
        RUNNING      -> ENDING | DONE | SWEEPING | LOST
        ENDING       -> HELD | DONE | SWEEPING | LOST
        HELD         -> DONE | SWEEPING | LOST
        SWEEPING     -> LOST

    DONE and LOST are final. A node whose sweep cannot be started goes to LOST at once.
    """

    CONNECTING = enum.auto()
    """The launcher is connecting to the host; the agent does not accept records yet."""
    RUNNING = enum.auto()
    """The agent accepts records."""
    ENDING = enum.auto()
    """AgentEnded has arrived: the node's workers have ended, and the agent's channel closes next."""
    HELD = enum.auto()
    """As ENDING, but a watch still receives something before the channel closes, see ``Nodes.hold``."""
    DONE = enum.auto()
    """The agent has ended, or its host cannot be used."""
    SWEEPING = enum.auto()
    """The agent is lost; another agent on its host kills the node's remaining processes."""
    LOST = enum.auto()
    """The agent is lost, and no sweep is in progress."""

    @property
    def has_agent(self) -> bool:
        """Whether the agent accepts records."""
        return self is NodeState.RUNNING or self.is_ending

    @property
    def is_ending(self) -> bool:
        """Whether the agent has sent all its records for the outcome, and only has to exit."""
        return self in (NodeState.ENDING, NodeState.HELD)

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
        sweeper: handle of the agent that sweeps the host; None unless the state is SWEEPING.
        sweep_deadline: time limit of the sweep, by ``time.monotonic()``.
        facts: facts about a remote host; None for a local node, and until the agent is connected.
        workers: number of workers; 0 until the agent is ready.
        details: what the workers use, for the report; None until the agent has sent it.
        loss: how the node was lost, if that was before the end of the run, or why its host was not reached; else
            empty.
        is_ignored: a record of it was invalid, or could not be handled: its agent was killed, and all else of it
            is ignored.
    """

    index: int
    host: str
    handle: AgentHandle
    state: NodeState = NodeState.CONNECTING
    unkillable_pids: tuple[int, ...] | None = None
    sweeper: AgentHandle | None = None
    sweep_deadline: float = NEVER
    facts: NodeFacts | None = None
    workers: int = 0
    details: NodeDetails | None = None
    loss: str = ""
    is_ignored: bool = False


class Nodes:
    """All nodes of a run.

    Attributes:
        all: every node that was started, or passed over, by index; the hosts behind them are spares.
    """

    def __init__(self, transport: Transport, spec: Callable[[int, Mapping[str, int]], AgentSpec]) -> None:
        """``spec`` builds the AgentSpec of node ``index``, given the descriptors that its agent has inherited."""
        self._transport = transport
        self._spec = spec
        self.all: list[Node] = []
        self._maybe_connecting: list[Node] = []
        self._maybe_unfinished: list[Node] = []
        self._sweeping: dict[int, Node] = {}
        """By index, the one with the earliest deadline first."""

    @property
    def connected(self) -> Iterator[Node]:
        """The nodes whose agents accept records."""
        return (node for node in self.all if node.state.has_agent)

    @property
    def lost(self) -> list[Node]:
        """The nodes whose agents are lost."""
        return [node for node in self.all if node.state.is_lost]

    @property
    def losses(self) -> dict[str, str]:
        """By host: how a node was lost, or why its host was not reached."""
        return {node.host: node.loss for node in self.all if node.loss}

    @property
    def all_finished(self) -> bool:
        """Whether all agents and all sweeps have ended."""
        return _all_passed(self._maybe_unfinished, lambda node: node.state.is_final)

    @property
    def any_sweeping(self) -> bool:
        """Whether a sweep is in progress."""
        return bool(self._sweeping)

    @property
    def only_sweeping(self) -> list[str]:
        """The hosts whose sweeps are all that the end of the run waits for; empty if it waits for an agent, too."""
        unfinished = [node for node in self.all if not node.state.is_final]
        return [node.host for node in unfinished] if all(node.sweeper for node in unfinished) else []

    @property
    def any_connecting(self) -> bool:
        """Whether the launcher is still connecting to a node."""
        return not _all_passed(self._maybe_connecting, lambda node: node.state is not NodeState.CONNECTING)

    @property
    def unkillable_pids(self) -> tuple[int, ...]:
        """Processes that survived SIGKILL, on all nodes that have reported."""
        return tuple(sorted(pid for node in self.all for pid in node.unkillable_pids or ()))

    # Start.

    def start_next(self) -> Node:
        """Start the agent of the next host; ``start_together`` must follow.

        Raises:
            LaunchError: it cannot be started.
        """
        index = len(self.all)
        node = Node(index, self.hosts[index], self._transport.start(index))
        for nodes in (self.all, self._maybe_connecting, self._maybe_unfinished):
            nodes.append(node)
        if not self._transport.is_remote:
            self.on_agent_connected(node)
        return node

    def start_together(self) -> None:
        """All nodes that are to be started now have been: a transport may have waited for that."""
        self._transport.start_together()

    def skip_next(self) -> None:
        """The next host takes no part."""
        index = len(self.all)
        self.all.append(Node(index, self.hosts[index], NoAgent(), NodeState.DONE, unkillable_pids=()))

    @property
    def hosts(self) -> Sequence[str]:
        """Display names of all nodes, the spares last."""
        return self._transport.node_names

    def on_agent_connected(self, node: Node, facts: NodeFacts | None = None) -> None:
        """The agent accepts records: send its AgentSpec."""
        node.state, node.facts = NodeState.RUNNING, facts
        node.handle.send(self._spec(node.index, node.handle.inherited_fds))

    def hold(self, node: Node) -> None:
        """A watch receives more from the agent of ``node``, which is ENDING, and sees to its end."""
        node.state = NodeState.HELD

    def end_unused(self, node: Node) -> None:
        """The host of ``node`` cannot be used, and nothing was left there."""
        node.state, node.unkillable_pids = NodeState.DONE, ()

    def stop_connecting(self) -> None:
        """Cancel all connections that are not established yet."""
        for node in self.all:
            if node.state is NodeState.CONNECTING:
                self.end_unused(node)
                node.handle.end_input()

    def send(self, record: object) -> None:
        """Send ``record`` to all agents."""
        for node in self.connected:
            node.handle.send(record)

    def send_to(self, index: int, record: object) -> None:
        """Send ``record`` to the agent of one node."""
        self.all[index].handle.send(record)

    # The sweep of lost nodes.

    def sweep(self, node: Node) -> None:
        """The agent of ``node`` is lost: start to kill the node's remaining processes."""
        node.sweeper = self._transport.sweep(node.index, lambda event: self.on_sweep_event(node, event))
        node.state = NodeState.SWEEPING if node.sweeper else NodeState.LOST
        if node.sweeper:
            node.sweep_deadline = time.monotonic() + SWEEP_S
            self._sweeping[node.index] = node

    def on_sweep_event(self, node: Node, event: object) -> None:
        """Handle an event of the agent that sweeps; ChannelClosed or HostFailure is the last one."""
        if isinstance(event, AgentEnded):
            node.unkillable_pids = event.unkillable_pids
        elif isinstance(event, (ChannelClosed, HostFailure)):
            self._end_sweep(node)

    def run_due(self, now: float) -> float:
        """End the sweeps that have reached their deadline. Returns the next deadline."""
        while node := next(iter(self._sweeping.values()), None):
            if now < node.sweep_deadline:
                return node.sweep_deadline
            if node.sweeper:
                node.sweeper.kill()
            self._end_sweep(node)
        return NEVER

    def _end_sweep(self, node: Node) -> None:
        self._sweeping.pop(node.index, None)
        if node.sweeper:
            node.sweeper.close()
            node.sweeper, node.state = None, NodeState.LOST

    # The end.

    def close(self, timeout_s: float) -> None:
        """End all agents; returns when they have exited. Local ones are killed after ``timeout_s``."""
        for node in self.all:
            node.handle.end_input()
        for node in self.all:
            for handle in (node.handle, node.sweeper):
                if handle:
                    handle.close(timeout_s)
        self._transport.close()


def _all_passed(nodes: list[Node], passed: Callable[[Node], bool]) -> bool:
    """Whether all ``nodes`` have ``passed`` a state for good; removes such nodes from the end of the list.

    Called after every event: with thousands of nodes, a check of all of them each time would take most of the CPU time.
    """
    while nodes and passed(nodes[-1]):
        nodes.pop()
    return not nodes
