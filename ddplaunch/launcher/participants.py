"""The nodes that take part in a run, and their rendezvous. A spare takes the position of a node that is left out.

Runs in the launcher, in the main thread. Decides only whether the hosts can be used together; ``lost_nodes``
decides about lost nodes, ``departure`` about nodes that must not be used again.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, Level
from ddplaunch.launcher.rendezvous_manager import RendezvousManager
from ddplaunch.protocol.launcher_agent import StopWorkers
from ddplaunch.transport.failures import UNREACHABLE, HostFailure, failures_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ddplaunch.config import RendezvousConfig
    from ddplaunch.launcher.attempts import Attempts
    from ddplaunch.launcher.nodes import Node, Nodes


class Participants:
    """Those of one run.

    Attributes:
        nodes: all nodes of the run.
        indices: the nodes that take part, in the order of their ranks; a spare gets the position of the node that it
            replaces.
        rendezvous: where they meet; None where the launcher does not assign the rendezvous.
    """

    def __init__(
        self,
        nodes: Nodes,
        min_nodes: int,
        max_nodes: int,
        rendezvous: RendezvousConfig | None,
        attempts: Attempts,
        show: Callable[[str, int], None],
    ) -> None:
        """``rendezvous`` are the settings of every rendezvous; None where the launcher does not assign it."""
        self.nodes = nodes
        self.indices: list[int] = []
        self.rendezvous = RendezvousManager(rendezvous, lambda: self.spares) if rendezvous else None
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self._attempts, self._show = attempts, show
        self._passed_over: set[int] = set()
        self._failures: list[HostFailure] = []
        self._shown_failures = 0

    def start(self) -> Iterator[Node]:
        """Start the agents of the first nodes, and yield each node; the other hosts are spares.

        ``on_changed`` must follow. The caller may stop earlier, when the run is stopped.

        Raises:
            LaunchError: an agent cannot be started.
        """
        for _ in range(min(self._max_nodes, len(self.nodes.hosts))):
            node = self.nodes.start_next()
            self.indices.append(node.index)
            yield node

    def on_changed(self) -> None:
        """Once no node is connecting: check the participants, and announce their rendezvous if they have one.

        To be called after every change of nodes.

        Raises:
            LaunchError: too few hosts can be used.
        """
        if self.nodes.any_connecting:
            return
        for node, failure in self._torch_mismatches():
            node.handle.end_input()
            self.exclude(node, failure)  # Calls this method again, for the remaining nodes.
            return
        if len(self.indices) < self._min_nodes:
            raise LaunchError(f"not enough hosts can be used\n{failures_table(self._failures)}", "", NODE_NOT_READY)
        self._show_failures()
        if self.rendezvous:
            self.rendezvous.announce(self.indices, self._attempts, self.nodes.send_to)

    def _show_failures(self) -> None:
        for failure in self._failures[self._shown_failures :]:
            self._show(f"{failure.host} cannot be used: {failure.message}; the job runs without it", Level.ALWAYS)
        self._shown_failures = len(self._failures)

    def _torch_mismatches(self) -> list[tuple[Node, HostFailure]]:
        """The participants whose version of torch differs from the most frequent one."""
        nodes = map(self.nodes.all.__getitem__, self.indices)
        by_host = {node.host: (node, node.facts) for node in nodes if node.facts}
        if len(by_host) < 2:
            return []
        from ddplaunch.transport.remote_start import check_torch_versions

        failures = check_torch_versions({host: facts for host, (_, facts) in by_host.items() if facts})
        return [(by_host[failure.host][0], failure) for failure in failures]

    # What the run has without some of its nodes.

    def can_continue_without(self, node: Node) -> bool:
        """Whether the run has enough nodes, spares included, if the participant ``node`` is removed."""
        remaining, needed = self.remaining_without(node)
        return bool(self.rendezvous) and node.index in self.indices and remaining >= needed

    @property
    def spares(self) -> int:
        """Number of hosts on which a node can still be started."""
        return len(set(range(len(self.nodes.all), len(self.nodes.hosts))) - self._passed_over)

    def remaining_without(self, *nodes: Node) -> tuple[int, int]:
        """How many nodes, spares included, the run has without ``nodes``, and how many it needs."""
        participants = set(self.indices) - {node.index for node in nodes}
        return len(participants) + self.spares, self._min_nodes

    def pass_over(self, hosts: Collection[str]) -> None:
        """No spare on one of these is started; replaces an earlier call."""
        names, started = self.nodes.hosts, len(self.nodes.all)
        self._passed_over = {index for index in range(started, len(names)) if names[index] in hosts}

    # Changes.

    def exclude(self, node: Node, failure: HostFailure) -> None:
        """The host of ``node`` cannot be used: continue without it.

        Raises:
            LaunchError: too few other hosts can be used.
        """
        self._failures.append(failure)
        if failure.cause in UNREACHABLE:
            node.loss = f"{node.host} could not be reached: {failure.message}"
        self.nodes.end_unused(node)
        self.continue_without(node)

    def continue_without(self, node: Node) -> None:
        """Start a spare in the position of ``node``; without a spare the world shrinks.

        Raises:
            LaunchError: too few hosts can be used.
        """
        position, spare = self.indices.index(node.index), self._start_spare()
        self.indices[position : position + 1] = [spare.index] if spare else []
        if spare:
            self._show(f"{spare.host} replaces {node.host}", Level.NORMAL)
        if len(self.indices) >= self._min_nodes:
            self._tell_rendezvous(node)
        self.on_changed()

    def _start_spare(self) -> Node | None:
        nodes = self.nodes
        while (index := len(nodes.all)) in self._passed_over:
            nodes.skip_next()
            self._show(f"{nodes.hosts[index]} is not chosen: SLURM takes it out of service", Level.NORMAL)
        return nodes.start_next() if index < len(nodes.hosts) else None

    def retire(self, node: Node) -> None:
        """Continue without ``node``, whose workers have ended. Its agent ends, and sends its logs.

        Raises:
            LaunchError: too few hosts can be used.
        """
        self.continue_without(node)
        node.handle.send(StopWorkers(signal.SIGTERM, 0.0))

    def remove(self, node: Node) -> None:
        """Remove ``node`` from the participants, without replacement."""
        self.indices.remove(node.index)
        if self.indices:
            self._tell_rendezvous(node)

    def _tell_rendezvous(self, removed: Node) -> None:
        if self.rendezvous:
            self.rendezvous.remove_node(removed.index, self.indices, self.nodes.send_to)

    def set_departing(self, departing: Mapping[int, str]) -> None:
        """These nodes, by index, leave after the present attempt, for these reasons; replaces an earlier call."""
        if self.rendezvous:
            self.rendezvous.set_departing(departing, self.indices, self.nodes.send_to)

    def move_rendezvous(self, index: int, token: str, reason: str) -> None:
        """Node ``index`` has lost the rendezvous ``token``: if it is the present one, the nodes start another.

        The user is told once, however many nodes report it before the new one begins.

        Raises:
            LaunchError: too many rendezvous have failed one after the other.
        """
        rendezvous, nodes = self.rendezvous, self.nodes.all
        is_present = rendezvous and token == rendezvous.token and rendezvous.server is not None
        if rendezvous and is_present and index in self.indices:
            server = rendezvous.server or 0
            which = "the rendezvous" if server == index else f"the rendezvous on {nodes[server].host}"
            host = nodes[index].host
            self._show(f"{host} has lost {which} ({reason}); the nodes start a new one", Level.NORMAL)
            rendezvous.relocate(f"{host} cannot join {which}: {reason}")
            self.on_changed()
