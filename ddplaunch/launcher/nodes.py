"""The nodes of a run: an agent on each, where they meet, who is lost and who takes its place. Main thread only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_LOST, NODE_NOT_READY, LaunchError
from ddplaunch.launcher.failures import HostFailure, failures_table
from ddplaunch.launcher.handles import AgentLost, Node, Starter
from ddplaunch.launcher.meeting_place import MeetingPlace
from ddplaunch.records import AgentEnded, RendezvousGone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddplaunch.config import Meeting
    from ddplaunch.launcher.attempts import Attempts
    from ddplaunch.launcher.remote import NodeFacts


SWEEP_S = 20.0
"""How long the sweep of a lost node may take."""


class Nodes:
    """All nodes of a run.

    Attributes:
        seats: indices of the nodes that take part, in the order of their ranks; one that comes for a lost node takes
            its seat.
        sweep_deadline: when the next sweep of a lost node has had its time.
        place: where they meet; None where the launcher does not lead.
    """

    def __init__(
        self,
        starter: Starter,
        min_nodes: int,
        max_nodes: int,
        meeting: Meeting | None,
        attempts: Attempts,
        say: Callable[[str, int], None],
    ) -> None:
        """``meeting`` is what all meetings have in common; None where the launcher does not lead."""
        self._starter = starter
        self._min_nodes = min_nodes
        self._max_nodes = max_nodes
        self._attempts = attempts
        self._say = say
        self.all: list[Node] = []
        self.seats: list[int] = []
        self.sweep_deadline = float("inf")
        self._connecting: list[Node] = []
        self._going_on: list[Node] = []
        self._failures: list[HostFailure] = []
        self._told_failures = 0
        self.place = MeetingPlace(meeting) if meeting else None

    @property
    def running(self) -> Iterator[Node]:
        """Those whose agents hear what is sent."""
        return (node for node in self.all if node.state == "running")

    @property
    def are_over(self) -> bool:
        """No agent and no sweep goes on."""
        return _all_have(self._going_on, lambda node: node.state in ("ended", "lost") and node.sweep is None)

    @property
    def are_connecting(self) -> bool:
        """Some are still connected to."""
        return not _all_have(self._connecting, lambda node: node.state != "connecting")

    def start(self) -> None:
        """Start the agents of the first nodes; the rest are spares."""
        for _ in range(min(self._max_nodes, len(self._starter.hosts))):
            self.seats.append(self._start_next().index)
        self.meet()

    def _start_next(self) -> Node:
        index = len(self.all)
        node = Node(index, self._starter.hosts[index], self._starter.start(index))
        for nodes in (self.all, self._connecting, self._going_on):
            nodes.append(node)
        if not self._starter.is_remote:
            self.connected(node)
        return node

    def connected(self, node: Node, facts: NodeFacts | None = None) -> None:
        """The agent takes records."""
        node.state, node.facts = "running", facts
        node.handle.send(self._starter.spec(node.index))

    def send(self, record: object) -> None:
        """To all agents."""
        for node in self.running:
            node.handle.send(record)

    def _send_to(self, index: int, record: object) -> None:
        self.all[index].handle.send(record)

    def meet(self) -> None:
        """Once no node is waited for: see that all know where they meet. Call it whenever that may have changed.

        Raises:
            LaunchError: too few nodes can be used.
        """
        if self.are_connecting:
            return
        for node, failure in self._unlike():
            node.handle.end_input()
            self.failed(node, failure)  # And all others meet.
            return
        if len(self.seats) < self._min_nodes:
            raise LaunchError(f"not enough hosts can be used\n{failures_table(self._failures)}", "", NODE_NOT_READY)
        for failure in self._failures[self._told_failures :]:
            self._say(f"{failure.host} cannot be used: {failure.message}; the job does without it", -1)
        self._told_failures = len(self._failures)
        if self.place:
            self.place.invite(self.seats, self._attempts, self._send_to)

    def _unlike(self) -> list[tuple[Node, HostFailure]]:
        """Nodes whose torch is not the one that most have."""
        told = {node.host: (node, node.facts) for node in map(self.all.__getitem__, self.seats) if node.facts}
        if len(told) < 2:
            return []
        from ddplaunch.launcher.remote import judge_versions

        failures = judge_versions({host: facts for host, (_, facts) in told.items() if facts})
        return [(told[failure.host][0], failure) for failure in failures]

    def rendezvous_gone(self, node: Node, event: RendezvousGone) -> None:
        """A node cannot reach the others any more: they meet anew.

        Raises:
            LaunchError: that was tried often enough.
        """
        if self.place and event.token == self.place.token:
            self._say(f"{node.host} has lost the rendezvous ({event.reason}); the nodes meet anew", 0)
            self.place.leave(node.host, event.reason)
            self.meet()

    def abandon(self) -> None:
        """Wait for no connection any more."""
        for node in self.all:
            if node.state == "connecting":
                node.state, node.left = "ended", ()
                node.handle.end_input()

    # Who is lost.

    def can_do_without(self, node: Node) -> bool:
        """This node takes part, and enough others would be left, spares included."""
        spares = len(self._starter.hosts) - len(self.all)
        return bool(self.place) and node.index in self.seats and len(self.seats) - 1 + spares >= self._min_nodes

    def failed(self, node: Node, failure: HostFailure) -> None:
        """A host cannot be used.

        Raises:
            LaunchError: too few others can.
        """
        self._failures.append(failure)
        node.state, node.left = "ended", ()
        self._replace(node)

    def lost(self, node: Node, why: str, hint: str = "", *, may_go_on: bool) -> None:
        """The agent of a node is gone; what it left is swept, and another node may take its place.

        Raises:
            LaunchError: too few nodes are left.
        """
        node.state = "lost"
        node.sweep = self._starter.sweep(node.index)
        node.sweep_deadline = time.monotonic() + SWEEP_S
        self.sweep_deadline = min(self.sweep_deadline, node.sweep_deadline)
        if node.index not in self.seats:
            return
        if not may_go_on or not self.can_do_without(node):
            self.seats.remove(node.index)
            if self.place and self.seats:
                self.place.left(node.index, self.seats, self._send_to)
            raise LaunchError(why, hint, NODE_LOST)
        self._say(f"{why}; the job goes on", -1)
        self._replace(node)

    def _replace(self, node: Node) -> None:
        """A spare takes the seat; without one it is empty, and the world smaller."""
        seat = self.seats.index(node.index)
        if len(self.all) < len(self._starter.hosts):
            self.seats[seat : seat + 1] = [self._start_next().index]
            self._say(f"{self.all[-1].host} takes the place of {node.host}", 0)
        else:
            del self.seats[seat]
        if self.place and len(self.seats) >= self._min_nodes:
            self.place.left(node.index, self.seats, self._send_to)
        self.meet()

    def give_up_sweeps(self, now: float) -> None:
        """End the sweeps whose time is over."""
        for node in self.all:
            if node.sweep and now >= node.sweep_deadline:
                node.sweep.kill()
                node.sweep.close()
                node.sweep = None
        self.sweep_deadline = min((node.sweep_deadline for node in self.all if node.sweep), default=float("inf"))

    @property
    def left(self) -> tuple[int, ...]:
        """Pids that could not be ended, of all nodes that have told."""
        return tuple(sorted(pid for node in self.all for pid in node.left or ()))

    @property
    def lost_ones(self) -> list[Node]:
        """The lost ones; ``left`` of one that could not be asked any more is None."""
        return [node for node in self.all if node.state == "lost"]

    def close(self, timeout_s: float) -> None:
        """End what still runs; returns when all agents of ours are gone. Local ones are killed after ``timeout_s``."""
        for node in self.all:
            node.handle.end_input()
        for node in self.all:
            for handle in (node.handle, node.sweep):
                if handle:
                    handle.close(timeout_s)
        self._starter.close()

    def swept(self, node: Node, event: object) -> None:
        """What the sweep of a lost node says; its last event is its end."""
        if isinstance(event, AgentEnded):
            node.left = event.left
        elif isinstance(event, (AgentLost, HostFailure)) and node.sweep:
            node.sweep.close()
            node.sweep = None


def _all_have(nodes: list[Node], passed: Callable[[Node], bool]) -> bool:
    """Whether all have ``passed`` what none comes back from; takes those at the end that have out of ``nodes``.

    This is asked after every event: to look at all nodes each time would take a launcher of thousands all its time.
    """
    while nodes and passed(nodes[-1]):
        nodes.pop()
    return not nodes
