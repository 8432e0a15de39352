"""Who is asked, how often, and who counts as lost; times are made up."""

from __future__ import annotations

import pytest

from ddplaunch.launcher.handles import Node
from ddplaunch.launcher.heartbeats import BEAT_S, Heartbeats
from ddplaunch.records import Ping


class Handle:
    """An agent that only hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def send(self, record: object) -> None:
        self.heard.append(record)


@pytest.fixture
def nodes() -> list[Node]:
    return [Node(index, f"node{index}", Handle(), "running") for index in range(3)]


def test_nodes_that_come_one_after_the_other_are_asked_together(nodes: list[Node]):
    heartbeats = Heartbeats(5.0)
    for place, node in enumerate(nodes):
        heartbeats.begin(node, 0.1 * place)
        assert heartbeats.beat(0.1 * place, nodes, False) == []
    assert [node.handle.heard for node in nodes] == [[], [], []]
    heartbeats.beat(BEAT_S, nodes, False)
    assert [node.handle.heard for node in nodes] == [[Ping(5.0)]] * 3


def beaten(heartbeats: Heartbeats, nodes: list[Node], from_s: int, to_s: int, is_behind: bool = False) -> list[Node]:
    """Who is lost at the last of these seconds; before, nobody is."""
    lost: list[Node] = []
    for second in range(from_s, to_s + 1):
        assert lost == []
        heartbeats.heard(nodes[0], second)
        lost = heartbeats.beat(second, nodes, is_behind)
    return lost


def test_who_does_not_answer_is_lost(nodes: list[Node]):
    heartbeats = Heartbeats(5.0)
    for node in nodes[:2]:
        heartbeats.begin(node, 0.0)
    assert beaten(heartbeats, nodes, 1, 6) == [nodes[1]]


def test_the_first_answer_may_take_longer(nodes: list[Node]):
    heartbeats = Heartbeats(5.0)
    for node in nodes[:2]:
        heartbeats.begin(node, 0.0, patience_s=10.0)
    assert beaten(heartbeats, nodes, 1, 16) == [nodes[1]]


def test_nobody_is_lost_while_answers_may_wait_to_be_read(nodes: list[Node]):
    heartbeats = Heartbeats(5.0)
    for node in nodes[:2]:
        heartbeats.begin(node, 0.0)
    assert beaten(heartbeats, nodes, 1, 20, is_behind=True) == []
    assert heartbeats.beat(21.0, nodes, False) == [nodes[1]]


def test_after_a_stop_of_this_process_all_have_time_again(nodes: list[Node]):
    heartbeats = Heartbeats(5.0)
    heartbeats.begin(nodes[0], 0.0)
    assert heartbeats.beat(100.0, nodes, False) == []
    assert heartbeats.beat(101.0, nodes, False) == []
