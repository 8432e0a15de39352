"""The nodes that take part in a run, and their rendezvous. A spare takes the position of a node that is left out.

Runs in the launcher, in the main thread. Whether a node may leave is decided here (``dispensable``), for nodes that are
lost (``lost_nodes``), that must not be used again, and that should not. Where each node has a launcher, the coordinator
decides, and dismisses nodes.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from ddplaunch.errors import HARDWARE, NODE_LOST, NODE_NOT_READY, LaunchError, Level
from ddplaunch.launcher.rendezvous_manager import RendezvousManager
from ddplaunch.protocol.launcher_agent import StopWorkers
from ddplaunch.text import quote
from ddplaunch.transport.failures import UNREACHABLE, HostFailure, failures_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ddplaunch.config import RendezvousConfig
    from ddplaunch.launcher.attempts import Attempts
    from ddplaunch.launcher.nodes import Node, Nodes
    from ddplaunch.protocol.results import AttemptResult

_MAX_REASON = 1000
"""Characters shown of a reason, which may come from a script."""


class Participants:
    """Those of one run.

    Attributes:
        nodes: all nodes of the run.
        indices: the nodes that take part, in the order of their ranks; a spare gets the position of the node that it
            replaces.
        rendezvous_manager: of the rendezvous where they meet; None where the launcher does not assign the rendezvous.
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
        self.rendezvous_manager = RendezvousManager(rendezvous, lambda: self.spares) if rendezvous else None
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
            raise self._too_few()
        self._show_failures()
        if self.rendezvous_manager:
            self.rendezvous_manager.announce(self.indices, self._attempts, self.nodes.send_to)

    def _too_few(self) -> LaunchError:
        """Spares cannot be used, or hosts at the start. After the loss of a node it is that which ends the run."""
        what = f"not enough hosts can be used\n{failures_table(self._failures)}"
        losses = [node.loss for node in self.nodes.lost if node.loss]
        return LaunchError(f"{losses[-1]}; {what}", "", NODE_LOST) if losses else LaunchError(what, "", NODE_NOT_READY)

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

    @property
    def dispensable(self) -> int:
        """How many participants the run can do without: spares replace them, or the world shrinks."""
        remaining, needed = self.remaining_without()
        return max(0, remaining - needed) if self.rendezvous_manager else 0

    def can_continue_without(self, node: Node) -> bool:
        """Whether ``node`` is a participant that the run can do without."""
        return node.index in self.indices and self.dispensable > 0

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

    def leave(self, node: Node, result: AttemptResult) -> None:
        """After an attempt: retire ``node`` if it must not be used again, or if it departs and is dispensable.

        To be called when ``result`` is counted: if the node serves the rendezvous, another one begins with the number
        of restarts.

        Raises:
            LaunchError: it is not dispensable. The coordinator did not know it, or the node has not heard its verdict.
        """
        if not result.attempt_follows or node.index not in self.indices or not self.rendezvous_manager:
            return
        from ddplaunch.rounds.verdict import too_few_nodes, why_not_used_again

        departing = self.rendezvous_manager.departing
        if why := why_not_used_again(result.exits):
            if not self.dispensable:
                raise LaunchError(quote(too_few_nodes(*self.remaining_without(node), why), _MAX_REASON), "", HARDWARE)
            self._show(quote(why, _MAX_REASON), Level.ALWAYS)
            self.retire(node)
        elif node.index in departing and self.dispensable:
            self._show(f"{node.host} is left: {quote(departing[node.index], _MAX_REASON)}", Level.NORMAL)
            self.retire(node)
        elif node.index in departing:  # The coordinator waits for this.
            self.set_departing({index: why for index, why in departing.items() if index != node.index})

    def on_suspend(self) -> None:
        """This process is about to be suspended: no attempt may wait for its decision about nodes that depart.

        The scheduler's next answer names them again.
        """
        if self.rendezvous_manager and self.rendezvous_manager.departing:
            self.set_departing({})

    def remove(self, node: Node) -> None:
        """Remove ``node`` from the participants, without replacement."""
        self.indices.remove(node.index)
        if self.indices:
            self._tell_rendezvous(node)

    def _tell_rendezvous(self, removed: Node) -> None:
        if self.rendezvous_manager:
            self.rendezvous_manager.remove_node(removed.index, self.indices, self.nodes.send_to)

    def set_departing(self, departing: Mapping[int, str]) -> None:
        """These nodes, by index, leave after the present attempt, for these reasons; replaces an earlier call."""
        if self.rendezvous_manager:
            self.rendezvous_manager.set_departing(departing, self.indices, self.nodes.send_to)

    def move_rendezvous(self, index: int, token: str, reason: str) -> None:
        """Node ``index`` has lost the rendezvous ``token``: if it is the present one, the nodes start another.

        The user is told once, however many nodes report it before the new one begins.

        Raises:
            LaunchError: too many rendezvous have failed one after the other.
        """
        rendezvous, nodes = self.rendezvous_manager, self.nodes.all
        if rendezvous and rendezvous.is_present(token) and index in self.indices:
            server = rendezvous.server or 0
            which = "the rendezvous" if server == index else f"the rendezvous on {nodes[server].host}"
            host = nodes[index].host
            self._show(f"{host} has lost {which} ({reason}); the nodes start a new one", Level.NORMAL)
            rendezvous.relocate(index, f"{host} cannot join {which}: {reason}")
            self.on_changed()
