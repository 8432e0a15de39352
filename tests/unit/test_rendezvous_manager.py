"""Which node serves the rendezvous, who is told where it is, and where it moves to."""

from __future__ import annotations

import pytest

from ddplaunch.config import RendezvousConfig
from ddplaunch.errors import LaunchError
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.rendezvous_manager import RendezvousManager
from ddplaunch.protocol.launcher_agent import EndpointOpen, JoinRendezvous
from ddplaunch.protocol.results import AssignNodes
from tests.support.configs import rendezvous_config
from tests.support.fake_agents import unexplained

COMMON = rendezvous_config(
    token="run", max_nodes=3, server_addresses=(), port=0, join_timeout_s=60.0, last_call_timeout_s=0.0
)


class Sent:
    """What agents were sent, by the index of their node, since it was last asked for."""

    def __init__(self) -> None:
        self._records: list[tuple[int, object]] = []

    def __call__(self, index: int, record: object) -> None:
        self._records.append((index, record))

    def take(self) -> list[tuple[int, object]]:
        records, self._records = self._records, []
        return records


def meetings(sent: list[tuple[int, object]]) -> dict[int, RendezvousConfig]:
    return {index: record.rendezvous for index, record in sent if isinstance(record, JoinRendezvous)}


@pytest.fixture
def sent() -> Sent:
    return Sent()


def opened(place: RendezvousManager, sent: Sent, seats: list[int]) -> dict[int, RendezvousConfig]:
    """The place is open, and all were invited; what they were told."""
    place.announce(seats, Attempts(unexplained), sent)
    server = meetings(sent.take())
    place.on_endpoint_open(seats[0], EndpointOpen(place.token, ("10.0.0.1", "10.1.0.1"), 4321))
    place.announce(seats, Attempts(unexplained), sent)
    return {**server, **meetings(sent.take())}


def test_the_first_node_serves_and_the_others_hear_where(sent: Sent):
    told = opened(RendezvousManager(COMMON), sent, [0, 1, 2])
    assert [(told[index].is_server, told[index].node_index) for index in range(3)] == [
        (True, 0),
        (False, 1),
        (False, 2),
    ]
    assert told[0].server_addresses == ()
    assert (told[2].server_addresses, told[2].port) == (("10.0.0.1", "10.1.0.1"), 4321)
    assert (told[0].participants, told[2].participants) == ((0, 1, 2), ()), "one of thousands need not know all"


def test_nobody_is_invited_twice(sent: Sent):
    place = RendezvousManager(COMMON)
    opened(place, sent, [0, 1])
    place.announce([0, 1], Attempts(unexplained), sent)
    assert sent.take() == []


def test_a_node_that_is_lost_is_told_to_the_one_that_serves_and_its_spare_is_invited(sent: Sent):
    place = RendezvousManager(COMMON)
    opened(place, sent, [0, 1, 2])
    place.remove_node(1, [0, 3, 2], sent)
    assert sent.take() == [(0, AssignNodes("run#1", (0, 3, 2)))]
    place.announce([0, 3, 2], Attempts(unexplained), sent)
    assert list(meetings(sent.take())) == [3]


def test_the_place_moves_when_the_node_that_serves_is_lost(sent: Sent):
    place = RendezvousManager(COMMON)
    before = opened(place, sent, [0, 1, 2])
    place.remove_node(0, [1, 2], sent)
    assert sent.take() == []
    told = opened(place, sent, [1, 2])
    assert (told[1].is_server, told[2].is_server) == (True, False)
    assert told[2].token != before[2].token


def test_what_is_said_of_a_place_that_was_left_counts_no_more(sent: Sent):
    place = RendezvousManager(COMMON)
    opened(place, sent, [0, 1])
    old = place.token
    place.relocate("node1 has gone")
    place.announce([0, 1], Attempts(unexplained), sent)
    sent.take()
    place.on_endpoint_open(0, EndpointOpen(old, ("10.0.0.9",), 1))
    place.announce([0, 1], Attempts(unexplained), sent)
    assert sent.take() == []


def test_a_rendezvous_that_moves_knows_which_nodes_depart(sent: Sent):
    place = RendezvousManager(COMMON)
    opened(place, sent, [0, 1, 2])
    place.set_departing({2: "drained"}, [0, 1, 2], sent)
    assert sent.take() == [(0, AssignNodes("run#1", (0, 1, 2), (2,)))]
    place.relocate("node1 has gone")
    told = opened(place, sent, [0, 1, 2])
    assert (told[0].departing, told[1].departing) == ((2,), ())
    place.remove_node(1, [0, 2], sent)
    assert sent.take() == [(0, AssignNodes("run#2", (0, 2), (2,)))]


def test_only_the_node_that_serves_says_where(sent: Sent):
    place = RendezvousManager(COMMON)
    place.announce([0, 1], Attempts(unexplained), sent)
    place.on_endpoint_open(1, EndpointOpen(place.token, ("10.6.6.6",), 1))
    place.announce([0, 1], Attempts(unexplained), sent)
    assert list(meetings(sent.take())) == [0]


def test_nodes_that_cannot_meet_are_not_invited_for_ever(sent: Sent):
    place = RendezvousManager(COMMON)
    for _ in range(4):
        opened(place, sent, [0, 1])
        place.relocate("node1 has no route")
    opened(place, sent, [0, 1])
    with pytest.raises(LaunchError, match="node1 has no route") as caught:
        place.relocate("node1 has no route")
    assert caught.value.exit_code == 83


def test_places_between_which_the_nodes_have_met_are_not_counted(sent: Sent):
    place = RendezvousManager(COMMON)
    for _ in range(10):
        opened(place, sent, [0, 1])
        place.on_round_formed(0)
        place.relocate("node1 has gone")


def test_a_round_of_an_earlier_rendezvous_is_not_one_of_the_present(sent: Sent):
    place, attempts = RendezvousManager(COMMON), Attempts(unexplained)
    attempts.on_started(0, 2, [0, 1])
    for _ in range(4):
        place.announce([0, 1], attempts, sent)
        place.on_round_formed(2)
        place.relocate("node1 has no route")
    place.announce([0, 1], attempts, sent)
    with pytest.raises(LaunchError, match="no route"):
        place.relocate("node1 has no route")
