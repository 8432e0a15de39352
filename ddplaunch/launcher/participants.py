"""The nodes that take part in a run, and where they meet. A spare takes the position of a node that is left out.

Runs in the launcher, in the main thread. Whether a node may leave is decided here (``dispensable_count``), for nodes
that are lost (``lost_nodes``), that must not be used again, or that a scheduler takes out of service. When a rendezvous
is lost, or the node that serves it, the first participant serves the next one. Where each node has a launcher, the
nodes meet by themselves, and the coordinator decides which of them leave.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import HARDWARE, NODE_LOST, NODE_NOT_READY, RENDEZVOUS, LaunchError, Level
from ddplaunch.protocol.launcher_agent import AssignNodes, EndpointOpen, JoinRendezvous, StopWorkers
from ddplaunch.text import quote
from ddplaunch.transport.failures import UNREACHABLE, HostFailure, check_torch_versions, failures_table

if TYPE_CHECKING:
    from ddplaunch.config import RendezvousConfig
    from ddplaunch.launcher.attempts import Attempts
    from ddplaunch.launcher.nodes import Node, Nodes
    from ddplaunch.protocol.results import AttemptResult

_MAX_REASON = 1000
"""Characters shown of a reason, which may come from a script."""

_MAX_TRIES = 5
"""Number of consecutive rendezvous without a round after which the run fails."""

_MAX_LOST_BY_ONE = 2
"""Number of consecutive rendezvous which one node alone may lose."""

_SEARCH_S = 60.0
"""In so many seconds, or half of the time to join, a node must get an answer at the endpoint, which is open before the
node is told of it."""


class Participants:
    """Those of one run. A node goes in one of three ways.

    ==================  =============================================================  ================================
    what has happened   who says it                                                    method
    ==================  =============================================================  ================================
    it is lost          ``LostNodes``                                                  ``replace_or_shrink``, ``remove``
    it cannot be used   the transport at the start, ``AgentFailed``, another torch     ``exclude``
    it leaves           after an attempt ``leave_if_due``, before the first            ``leave``
                        ``HealthWatch``
    ==================  =============================================================  ================================

    A spare takes its position, or the world shrinks (``replace_or_shrink``); only if the run ends anyway, ``remove``.

    Attributes:
        nodes: all nodes of the run.
        indices: the nodes that take part, in the order of their ranks; a spare gets the position of the node that it
            replaces.
        server_index: index of the node that serves the current rendezvous; None until the next one begins.
        departing: indices of nodes that leave after the present attempt, each with the reason.
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
        """``rendezvous``: what all rendezvous of the run have in common; None unless this launcher leads all nodes."""
        self.nodes = nodes
        self.indices: list[int] = []
        self._settings = rendezvous
        self.server_index: int | None = None
        self.departing: Mapping[int, str] = {}
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self._attempts, self._show = attempts, show
        self._passed_over: dict[int, str] = {}
        self._failures: list[HostFailure] = []
        self._shown_failures = 0
        self._ready: set[int] = set()
        self._were_all_ready = False
        self._number = 0
        """Of the current rendezvous."""
        self._tries = 0
        """How many rendezvous have followed the one at which a round was formed last."""
        self._lost_by: list[int] = []
        """The nodes that have lost these."""
        self._attempt = self._restart_count = 0
        """What the current rendezvous has begun with: the number of its first round, and the restarts before it."""
        self._endpoint: EndpointOpen | None = None
        self._informed: set[int] = set()
        """The nodes that were told of the current rendezvous."""

    def start(self) -> Iterator[Node]:
        """Start the agents of the first nodes, and yield each node; the other hosts are spares.

        ``check_and_announce`` must follow. The caller may stop earlier, when the run is stopped.

        Raises:
            LaunchError: an agent cannot be started.
        """
        for _ in range(min(self._max_nodes, len(self.nodes.hosts))):
            node = self.nodes.start_next()
            self.indices.append(node.index)
            yield node

    def check_and_announce(self) -> None:
        """Once no node is connecting: check the participants, and announce their rendezvous if they have one.

        To be called after every change of nodes.

        Raises:
            LaunchError: too few hosts can be used.
        """
        self.nodes.start_together()
        if self.nodes.any_connecting:
            return
        for node, failure in self._torch_mismatches():
            node.handle.end_input()
            self.exclude(node, failure)  # Calls this method again, for the remaining nodes.
            return
        if len(self.indices) < self._min_nodes:
            raise self._too_few_error()
        self._show_failures()
        if self._settings:
            self._announce(self._settings)

    def on_agent_ready(self, node: Node) -> dict[str, int] | None:
        """The agent of ``node`` is ready. Returns the workers by host once, when all participants are; else None."""
        self._ready.add(node.index)
        is_all = len(self._ready) >= len(self.indices) and self._ready >= set(self.indices)
        if self._were_all_ready or not is_all:
            return None
        self._were_all_ready = True
        return {self.nodes.all[index].host: self.nodes.all[index].workers for index in self.indices}

    def _too_few_error(self) -> LaunchError:
        """Spares cannot be used, or hosts at the start. After the loss of a node it is that which ends the run."""
        table, is_none_left = failures_table(self._failures), len(self._failures) >= len(self.nodes.hosts)
        what = f"no host can be used\n{table}" if is_none_left else f"not enough hosts can be used\n{table}"
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
        failures = check_torch_versions({host: facts for host, (_, facts) in by_host.items() if facts})
        return [(by_host[failure.host][0], failure) for failure in failures]

    # What the run has without some of its nodes.

    @property
    def dispensable_count(self) -> int:
        """How many participants the run can do without: spares replace them, or the world shrinks."""
        remaining, needed = self.remaining_and_needed()
        return max(0, remaining - needed) if self._settings else 0

    def can_do_without(self, node: Node) -> bool:
        """Whether ``node`` is a participant that the run can do without."""
        return node.index in self.indices and self.dispensable_count > 0

    @property
    def spares(self) -> int:
        """Number of hosts on which a node can still be started."""
        return len(set(range(len(self.nodes.all), len(self.nodes.hosts))) - self._passed_over.keys())

    def remaining_and_needed(self, without: Iterable[Node] = ()) -> tuple[int, int]:
        """How many nodes, spares included, the run has if it loses the nodes ``without``, and how many it needs."""
        participants = set(self.indices) - {node.index for node in without}
        return len(participants) + self.spares, self._min_nodes

    def pass_over(self, hosts: Mapping[str, str]) -> None:
        """No spare on one of these is started, for this reason; replaces an earlier call."""
        names, started = self.nodes.hosts, len(self.nodes.all)
        self._passed_over = {i: hosts[names[i]] for i in range(started, len(names)) if names[i] in hosts}

    # Changes.

    def exclude(self, node: Node, failure: HostFailure) -> None:
        """The host of ``node`` cannot be used: replace it or shrink the world.

        Raises:
            LaunchError: too few other hosts can be used.
        """
        self._failures.append(failure)
        if failure.cause in UNREACHABLE:
            node.loss = f"{node.host} could not be reached: {failure.message}"
        self.nodes.end_unused(node)
        self.replace_or_shrink(node)

    def replace_or_shrink(self, node: Node) -> None:
        """Start a spare in the position of ``node``; without a spare the world shrinks.

        Raises:
            LaunchError: too few hosts can be used.
        """
        position, spare = self.indices.index(node.index), self._start_spare()
        self.indices[position : position + 1] = [spare.index] if spare else []
        if spare:
            self._show(f"{spare.host} replaces {node.host}", Level.NORMAL)
        if len(self.indices) >= self._min_nodes:  # Else the run ends, and must not begin an attempt with too few nodes.
            self._unassign(node)
        self.check_and_announce()

    def _start_spare(self) -> Node | None:
        nodes = self.nodes
        while (index := len(nodes.all)) in self._passed_over:
            nodes.skip_next()
            self._show(
                f"{nodes.hosts[index]} is not chosen: {quote(self._passed_over[index], _MAX_REASON)}", Level.NORMAL
            )
        return nodes.start_next() if index < len(nodes.hosts) else None

    def leave(self, node: Node) -> None:
        """``node``, which runs no workers, leaves: replace it or shrink the world. Its agent sends its logs, and ends.

        Raises:
            LaunchError: too few hosts can be used.
        """
        self.replace_or_shrink(node)
        node.handle.send(StopWorkers(signal.SIGTERM, 0.0))

    def leave_if_due(self, node: Node, result: AttemptResult) -> None:
        """After an attempt: ``node`` leaves if it must not be used again, or if it departs and is dispensable.

        To be called when ``result`` is counted: if the node serves the rendezvous, another one begins with the number
        of restarts.

        Raises:
            LaunchError: it must not be used again, and is not dispensable. Mostly, the verdict has ended the run; not
                if the coordinator knew of more spares, or if the verdict has not reached the node.
        """
        if not result.attempt_follows or node.index not in self.indices or not self._settings:
            return
        from ddplaunch.rounds.verdicts import why_not_used_again, why_too_few_nodes

        departing = self.departing
        if why := why_not_used_again(result.exits):
            if not self.dispensable_count:
                told = why_too_few_nodes(*self.remaining_and_needed([node]), why)
                raise LaunchError(quote(told, _MAX_REASON), "", HARDWARE)
            self._show(quote(why, _MAX_REASON), Level.ALWAYS)
            self.leave(node)
        elif node.index in departing and self.dispensable_count:
            self._show(f"{node.host} leaves the run: {quote(departing[node.index], _MAX_REASON)}", Level.NORMAL)
            self.leave(node)
        elif node.index in departing:  # The coordinator waits for this.
            self.set_departing({index: why for index, why in departing.items() if index != node.index})

    def on_suspend(self) -> None:
        """This process is about to be suspended: no attempt may wait for its decision about nodes that depart.

        The scheduler's next answer names them again.
        """
        if self.departing:
            self.set_departing({})

    def remove(self, node: Node) -> None:
        """Remove ``node``, without replacement, where the run ends: the verdict must not wait for this node."""
        self.indices.remove(node.index)
        if self.indices:
            self._unassign(node)

    # The rendezvous.

    @property
    def token(self) -> str:
        """Identifies the current rendezvous."""
        return f"{self._settings.token}#{self._number}" if self._settings else ""

    def _announce(self, settings: RendezvousConfig) -> None:
        """Make the first participant serve if no node does; once its endpoint is open, send it to the other nodes."""
        if self.server_index is None:
            self.server_index = self.indices[0]
            self._number, self._tries, self._endpoint = self._number + 1, self._tries + 1, None
            self._attempt, self._restart_count = self._attempts.next_number, self._attempts.restart_count
            self._informed.clear()
        for index in self.indices if self._endpoint else (self.server_index,):
            if index not in self._informed:
                self._informed.add(index)
                self.nodes.send_to(index, self._join_record(settings, index))

    def _join_record(self, settings: RendezvousConfig, index: int) -> JoinRendezvous:
        config = replace(
            settings,
            token=self.token,
            node_index=index,
            is_server=index == self.server_index,
            # Only the server needs the indices: sent to thousands of nodes, they would be many megabytes in all.
            assigned=tuple(self.indices) if index == self.server_index else (),
            departing=tuple(self.departing) if index == self.server_index else (),
            spares=self.spares,
            attempt=self._attempt,
            restart_count=self._restart_count,
            search_timeout_s=min(_SEARCH_S, settings.join_timeout_s / 2),
        )
        if self._endpoint:
            config = replace(config, server_addresses=self._endpoint.addresses, port=self._endpoint.port)
        return JoinRendezvous(config)

    def on_endpoint_open(self, node: Node, event: EndpointOpen) -> None:
        """``node`` has opened an endpoint; it counts if that node serves the rendezvous.

        Raises:
            LaunchError: too few hosts can be used.
        """
        if node.index == self.server_index and event.token == self.token:
            self._endpoint = event
            self.check_and_announce()

    def on_round_formed(self, attempt: int) -> None:
        """A round with this number was formed: the current rendezvous works, unless it is a round of an earlier one."""
        if attempt >= self._attempt:
            self._tries = 0
            self._lost_by.clear()

    def _unassign(self, removed: Node) -> None:
        """Tell the coordinator to do without ``removed``; if that served, ``_announce`` begins the next rendezvous."""
        if self.server_index == removed.index:
            self.server_index = None
        self.departing = {index: why for index, why in self.departing.items() if index != removed.index}
        self._tell_coordinator()

    def set_departing(self, departing: Mapping[int, str]) -> None:
        """These nodes, by index, leave after the present attempt, for these reasons; replaces an earlier call.

        Without effect unless this launcher leads all nodes.
        """
        if self._settings:
            self.departing = departing
            self._tell_coordinator()

    def _tell_coordinator(self) -> None:
        """Which nodes take part, and which depart; also what it may know already."""
        if self.server_index is not None:
            told = AssignNodes(self.token, tuple(self.indices), tuple(self.departing), self.spares)
            self.nodes.send_to(self.server_index, told)

    def is_current(self, token: str) -> bool:
        """Whether a node may still meet others in the rendezvous ``token``; never unless this launcher leads all nodes.

        So the loss of a rendezvous counts once, however many nodes report it before the next one begins.
        """
        return self.server_index is not None and token == self.token

    def is_cut_off(self, node: Node) -> bool:
        """Whether it is ``node`` alone that loses one rendezvous after the other, on a node that others reach."""
        loses_all = len(self._lost_by) >= _MAX_LOST_BY_ONE and set(self._lost_by) == {node.index}
        return loses_all and node.index != self.server_index

    def begin_new_rendezvous(self, node: Node, reason: str) -> None:
        """``node`` has lost the current rendezvous: the nodes start another, unless ``node`` takes part no longer.

        Raises:
            LaunchError: too many rendezvous have failed one after the other.
        """
        if node.index not in self.indices:
            return
        serves = self.server_index == node.index
        which = "the rendezvous" if serves else f"the rendezvous on {self.nodes.all[self.server_index or 0].host}"
        self.server_index = None
        self._lost_by.append(node.index)
        if self._tries >= _MAX_TRIES:
            raise LaunchError(
                f"{node.host} cannot join {which}: {reason}",
                "Check that every node can reach every other at any port; "
                "--local-addr and --interface select the network.",
                RENDEZVOUS,
            )
        self._show(f"{node.host} has lost {which} ({reason}); the nodes start a new one", Level.NORMAL)
        self.check_and_announce()
