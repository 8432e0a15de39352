"""Where the nodes of a run meet, as their launcher arranges it: which serves, where, and who was told. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import RENDEZVOUS, LaunchError
from ddplaunch.model import NodesExpected
from ddplaunch.records import EndpointOpen, Meet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.config import Meeting
    from ddplaunch.launcher.attempts import Attempts

_MAX_TRIES = 5
"""Places left one after the other without a round: the nodes cannot meet."""


class MeetingPlace:
    """The rendezvous of a run: one at a time, opened anew at another node when the one that serves it is lost.

    ``send`` of its methods takes a node's index and a record for its agent. Seats are indices in the order of ranks.
    """

    def __init__(self, common: Meeting) -> None:
        """``common`` is what all places have in common."""
        self._meeting = common
        self._number = 0
        self._tries = 0
        self._server: int | None = None
        self._endpoint: EndpointOpen | None = None
        self._told: set[int] = set()

    @property
    def token(self) -> str:
        """The present place's own."""
        return f"{self._meeting.token}#{self._number}"

    def invite(self, seats: Sequence[int], attempts: Attempts, send: Callable[[int, object], None]) -> None:
        """Have the first node serve, if none does; tell those the place who were not told yet."""
        if self._server is None:
            self._number, self._tries, self._endpoint = self._number + 1, self._tries + 1, None
            self._told, self._server = {seats[0]}, seats[0]
            self._attempt, self._restarts = attempts.next_number, attempts.restarts
            send(self._server, self._meet(self._server, seats))
        elif self._endpoint:
            for index in seats:
                if index not in self._told:
                    self._told.add(index)
                    send(index, self._meet(index, seats))

    def _meet(self, index: int, seats: Sequence[int]) -> Meet:
        place = replace(
            self._meeting,
            token=self.token,
            node_rank=index,
            serves=index == self._server,
            seats=tuple(seats) if index == self._server else (),  # To all of thousands they would be many megabytes.
            attempt=self._attempt,
            restarts=self._restarts,
        )
        if self._endpoint:
            place = replace(place, hosts=self._endpoint.addresses, port=self._endpoint.port)
        return Meet(place)

    def opened(self, event: EndpointOpen) -> None:
        """The node that serves says where; all others can be invited."""
        if event.token == self.token:
            self._endpoint = event

    def round_formed(self) -> None:
        """The nodes have met."""
        self._tries = 0

    def left(self, index: int, seats: Sequence[int], send: Callable[[int, object], None]) -> None:
        """A node is lost; ``seats`` are those that go on."""
        if self._server == index:
            self._server = None
        elif self._server is not None:
            send(self._server, NodesExpected(tuple(seats)))

    def leave(self, host: str, reason: str) -> None:
        """``host`` has lost its way to the place: there must be another.

        Raises:
            LaunchError: that was tried often enough.
        """
        self._server = None
        if self._tries >= _MAX_TRIES:
            raise LaunchError(
                f"{host} cannot meet the other nodes: {reason}",
                "Can every node reach every other, at any port? --local-addr and --interface name the way.",
                RENDEZVOUS,
            )
