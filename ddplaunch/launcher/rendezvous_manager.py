"""The rendezvous of a run whose launcher assigns it: which node serves it, its endpoint, the nodes that have joined.

Runs in the launcher. Pure: sends records through callbacks. ``lost_nodes`` decides about lost nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import RENDEZVOUS, LaunchError
from ddplaunch.protocol.launcher_agent import AssignNodes, EndpointOpen, JoinRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddplaunch.config import RendezvousConfig
    from ddplaunch.launcher.attempts import Attempts

_MAX_TRIES = 5
"""Number of consecutive rendezvous without a round after which the run fails."""

_MAX_LOST_BY_ONE = 2
"""Number of consecutive rendezvous which one node alone may lose."""

_SEARCH_S = 60.0
"""In so many seconds, or half of the time to join, a node must get an answer at the endpoint, which is open before the
node is told of it."""


class RendezvousManager:
    """Manages one rendezvous at a time; when the node that serves it is lost, another node serves the next one.

    ``send`` of its methods takes a node's index and a record for its agent. ``participants`` are indices of nodes in
    the order of their ranks.

    Attributes:
        server: index of the node that serves the present rendezvous; None until the next ``announce``.
        departing: indices of nodes that leave after the present attempt, each with the reason.
    """

    def __init__(self, settings: RendezvousConfig, count_spares: Callable[[], int] = lambda: 0) -> None:
        """``settings`` apply to every rendezvous of the run."""
        self._settings, self._count_spares = settings, count_spares
        self._number = 0
        self._tries = 0
        self._lost_by: list[int] = []
        """The nodes that have lost a rendezvous since the last round was formed."""
        self._attempt = self._restarts_so_far = 0
        self.server: int | None = None
        self._endpoint: EndpointOpen | None = None
        self._informed: set[int] = set()
        self.departing: Mapping[int, str] = {}

    @property
    def token(self) -> str:
        """Identifies the present rendezvous."""
        return f"{self._settings.token}#{self._number}"

    def announce(self, participants: Sequence[int], attempts: Attempts, send: Callable[[int, object], None]) -> None:
        """Make the first participant serve if no node does; once its endpoint is open, send it to the other nodes."""
        if self.server is None:
            self._number, self._tries, self._endpoint = self._number + 1, self._tries + 1, None
            self._informed, self.server = {participants[0]}, participants[0]
            self._attempt, self._restarts_so_far = attempts.next_number, attempts.restarts_so_far
            send(self.server, self._join_record(self.server, participants))
        elif self._endpoint:
            for index in participants:
                if index not in self._informed:
                    self._informed.add(index)
                    send(index, self._join_record(index, participants))

    def _join_record(self, index: int, participants: Sequence[int]) -> JoinRendezvous:
        config = replace(
            self._settings,
            token=self.token,
            node_index=index,
            is_server=index == self.server,
            # Only the server needs the indices: sent to thousands of nodes, they would be many megabytes in all.
            participants=tuple(participants) if index == self.server else (),
            departing=tuple(self.departing) if index == self.server else (),
            spares=self._count_spares(),
            attempt=self._attempt,
            restarts_so_far=self._restarts_so_far,
            search_timeout_s=min(_SEARCH_S, self._settings.join_timeout_s / 2),
        )
        if self._endpoint:
            config = replace(config, server_addresses=self._endpoint.addresses, port=self._endpoint.port)
        return JoinRendezvous(config)

    def on_endpoint_open(self, index: int, event: EndpointOpen) -> None:
        """Node ``index`` has opened an endpoint; it counts if that node serves the rendezvous."""
        if index == self.server and event.token == self.token:
            self._endpoint = event

    def on_round_formed(self, attempt: int) -> None:
        """A round with this number was formed: the present rendezvous works, unless it is a round of an earlier one."""
        if attempt >= self._attempt:
            self._tries = 0
            self._lost_by.clear()

    def remove_node(self, index: int, participants: Sequence[int], send: Callable[[int, object], None]) -> None:
        """Node ``index`` is lost; ``participants`` are the remaining nodes."""
        if self.server == index:
            self.server = None
        self.set_departing({i: why for i, why in self.departing.items() if i != index}, participants, send)

    def set_departing(
        self, departing: Mapping[int, str], participants: Sequence[int], send: Callable[[int, object], None]
    ) -> None:
        """These nodes leave after the present attempt; tells the coordinator, also what it may know already."""
        self.departing = departing
        if self.server is not None:
            told = AssignNodes(self.token, tuple(participants), tuple(departing), self._count_spares())
            send(self.server, told)

    def is_present(self, token: str) -> bool:
        """Whether a node may still meet others in the rendezvous ``token``."""
        return token == self.token and self.server is not None

    def is_cut_off(self, index: int) -> bool:
        """Whether it is node ``index`` alone that loses one rendezvous after the other, on a node that others reach."""
        return index != self.server and len(self._lost_by) >= _MAX_LOST_BY_ONE and set(self._lost_by) == {index}

    def relocate(self, index: int, problem: str) -> None:
        """Node ``index`` has lost the rendezvous: the next ``announce`` starts another. ``problem`` says what is wrong.

        Raises:
            LaunchError: too many rendezvous have failed one after the other.
        """
        self.server = None
        self._lost_by.append(index)
        if self._tries >= _MAX_TRIES:
            raise LaunchError(
                problem,
                "Check that every node can reach every other at any port; "
                "--local-addr and --interface select the network.",
                RENDEZVOUS,
            )
