"""Which node serves the rendezvous, who is told where it is, and where it moves to."""

from __future__ import annotations

import pytest

from ddplaunch.errors import LaunchError
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.rendezvous_manager import RendezvousManager
from ddplaunch.protocol.launcher_agent import EndpointOpen
from tests.support import golden
from tests.support.configs import rendezvous_config
from tests.support.fake_agents import brief, unexplained


class Place:
    """A rendezvous of up to three nodes. Its methods are the steps of a story."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.place = RendezvousManager(rendezvous_config(token="run", max_nodes=3, server_addresses=(), port=0))
        self.attempts, self.last_token = Attempts(unexplained), ""

    def _send(self, index: int, record: object) -> None:
        self.said.append(f"{index} <- {brief(record)}")

    def invite(self, *nodes: str) -> None:
        self.place.announce([*map(int, nodes)], self.attempts, self._send)

    def open(self, index: str, token: str = "") -> None:
        """A node says that the rendezvous is open there; ``old`` is that before."""
        token = self.last_token if token else self.place.token
        self.place.on_endpoint_open(int(index), EndpointOpen(token, ("10.0.0.1", "10.1.0.1"), 4321))

    def meet(self, *nodes: str) -> None:
        """The place is open, and all were invited."""
        self.invite(*nodes)
        self.open(nodes[0])
        self.invite(*nodes)

    def remove(self, index: str, *others: str) -> None:
        self.place.remove_node(int(index), [*map(int, others)], self._send)

    def departs(self, index: str, *nodes: str) -> None:
        self.place.set_departing({int(index): "drained"}, [*map(int, nodes)], self._send)

    def move(self) -> None:
        self.last_token = self.place.token
        try:
            self.place.relocate(1, "node1 has no route")
        except LaunchError as error:
            self.said.append(f"error {error.exit_code}: {error.message}")

    def formed(self, attempt: str) -> None:
        self.place.on_round_formed(int(attempt))


def test_who_is_told_where_nodes_meet() -> None:
    golden.check_pages("rendezvous_places", lambda story: golden.play(Place(), story.partition(": ")[2]))


def test_places_between_which_the_nodes_have_met_are_not_counted() -> None:
    story = Place()
    for _ in range(10):
        story.meet("0", "1")
        story.formed("0")
        story.place.relocate(1, "node1 has gone")


def test_a_round_of_an_earlier_rendezvous_is_not_one_of_the_present() -> None:
    story = Place()
    story.attempts.on_started(0, 2, [0, 1])
    for _ in range(4):
        story.invite("0", "1")
        story.formed("2")
        story.place.relocate(1, "node1 has no route")
    story.invite("0", "1")
    with pytest.raises(LaunchError, match="no route"):
        story.place.relocate(1, "node1 has no route")
