"""Which nodes take part once all have told what they have; another version of torch cannot be installed twice here."""

from __future__ import annotations

import pytest

from ddplaunch.errors import LaunchError
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.handles import AgentLost
from ddplaunch.launcher.nodes import Nodes
from ddplaunch.launcher.remote import NodeFacts


class Handle:
    """An agent that only hears."""

    def __init__(self) -> None:
        self.is_ended = False

    def send(self, record: object) -> None: ...

    def end_input(self) -> None:
        self.is_ended = True

    def close(self) -> int:
        return 0


class Starter:
    is_remote = True

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts

    def start(self, index: int) -> Handle:
        return Handle()

    def spec(self, index: int) -> None: ...

    def sweep(self, index: int) -> Handle:
        return Handle()


def connected(nodes: Nodes, *versions: str) -> None:
    for node, torch in zip(nodes.all, versions, strict=True):
        nodes.connected(node, NodeFacts(torch=torch))
    nodes.meet()


def started(min_nodes: int, max_nodes: int, *hosts: str) -> tuple[Nodes, list[str]]:
    said: list[str] = []
    nodes = Nodes(Starter(*hosts), min_nodes, max_nodes, None, Attempts(), lambda text, _level: said.append(text))
    nodes.start()
    return nodes, said


def test_nodes_with_one_torch_all_take_part():
    nodes, _ = started(3, 3, "a", "b", "c")
    connected(nodes, "2.13", "2.13", "2.13")
    assert nodes.seats == [0, 1, 2]


def test_a_node_with_another_torch_is_left_out_and_said():
    nodes, said = started(2, 3, "a", "b", "c")
    connected(nodes, "2.13", "2.12", "2.13")
    assert nodes.seats == [0, 2]
    assert nodes.all[1].handle.is_ended
    assert said == ["b cannot be used: torch 2.12, and 2.13 on most hosts; the job does without it"]


def test_a_spare_takes_its_place():
    nodes, said = started(2, 2, "a", "b", "c")
    connected(nodes, "2.13", "2.12")
    nodes.connected(nodes.all[2], NodeFacts(torch="2.13"))
    nodes.meet()
    assert nodes.seats == [0, 2]
    assert "c takes the place of b" in said


def test_without_enough_others_all_are_told_in_one_table():
    nodes, _ = started(3, 3, "a", "b", "c")
    with pytest.raises(LaunchError, match=r"not enough hosts can be used\n  b: torch 2\.12, and 2\.13 on most hosts"):
        connected(nodes, "2.13", "2.12", "2.13")


def lost(nodes: Nodes, *indices: int) -> None:
    for index in indices:
        with pytest.raises(LaunchError):
            nodes.lost(nodes.all[index], "gone", may_go_on=False)


def test_the_run_is_over_when_all_nodes_are_whatever_their_order():
    nodes, _ = started(3, 3, "a", "b", "c")
    connected(nodes, "2.13", "2.13", "2.13")
    assert nodes.sweep_deadline == float("inf")
    lost(nodes, 1)
    assert nodes.sweep_deadline < float("inf")
    for node in (nodes.all[2], nodes.all[0]):
        assert not nodes.are_over
        node.state = "ended"
    assert not nodes.are_over, "a sweep goes on"
    nodes.swept(nodes.all[1], AgentLost())
    assert nodes.are_over
