"""Which nodes are pinged, how often, and which are silent; times are made up."""

from __future__ import annotations

from types import SimpleNamespace

from ddplaunch.launcher import pings
from ddplaunch.launcher.nodes import Node, NodeState
from ddplaunch.launcher.pings import INTERVAL_S, Pings
from tests.support.fake_agents import FakeHandle


class Watch:
    """Pings of three nodes, of which some are watched from time 0, and a mailbox that is empty at first."""

    def __init__(self, watched: int = 0, extra_s: float = 0.0) -> None:
        self.nodes = [Node(index, f"node{index}", FakeHandle(), NodeState.RUNNING) for index in range(3)]
        self.mailbox = SimpleNamespace(is_empty=True)
        self.silent: list[Node] = []
        self.pings = Pings(5.0, SimpleNamespace(connected=self.nodes), self.mailbox, self.silent.append, self.suspend)
        self.suspended = 0
        for node in self.nodes[:watched]:
            self.pings.watch(node, 0.0, extra_s)

    def suspend(self) -> None:
        self.suspended += 1

    def beat(self, from_s: int, to_s: int) -> list[Node]:
        """The first node answers every second; who is silent at the last of these seconds; before, no node is."""
        for second in range(from_s, to_s + 1):
            assert self.silent == []
            self.pings.on_pong(self.nodes[0], second)
            self.pings.run_due(second)
        return self.silent


def limits_s(node: Node) -> list[float]:
    """What the node was told with each ping."""
    return [ping.lost_after_s for ping in node.handle.sent]  # type: ignore[attr-defined]


def test_every_node_is_pinged_at_once_and_all_of_them_together_afterwards():
    watch = Watch()
    for number, node in enumerate(watch.nodes):
        watch.pings.watch(node, 0.1 * number)
        assert limits_s(node) == [5.0]
        assert watch.pings.run_due(0.1 * number) == INTERVAL_S
    assert watch.pings.run_due(INTERVAL_S) == 2 * INTERVAL_S
    assert [limits_s(node) for node in watch.nodes] == [[5.0] * 2] * 3


def test_nothing_is_due_while_no_node_is_watched():
    assert Watch().pings.run_due(100.0) == float("inf")


def test_a_node_that_does_not_answer_is_silent():
    watch = Watch(2)
    assert watch.beat(1, 6) == [watch.nodes[1]]


def test_the_first_answer_may_take_longer():
    watch = Watch(2, extra_s=10.0)
    assert watch.beat(1, 16) == [watch.nodes[1]]


def test_no_node_is_silent_while_answers_may_wait_to_be_read():
    watch = Watch(2)
    watch.mailbox.is_empty = False
    assert watch.beat(1, 20) == []
    watch.mailbox.is_empty = True
    assert watch.beat(21, 21) == [watch.nodes[1]]


def test_after_a_stop_of_this_process_all_nodes_have_time_again():
    watch = Watch(1)
    for now in (100.0, 101.0):
        watch.pings.run_due(now)
    assert watch.silent == []


def test_a_suspension_waits_until_the_agents_know_of_it():
    watch = Watch(3)
    for node in watch.nodes:
        watch.pings.on_pong(node, 0.1)
    watch.pings.suspend(0.5)
    for node in watch.nodes:
        assert watch.pings.run_due(0.6) == 0.5 + pings._SUSPEND_WAIT_S
        assert watch.suspended == 0
        watch.pings.on_pong(node, 0.6)
    assert watch.pings.run_due(0.7) == 0.7
    assert watch.suspended == 1


def test_an_agent_that_is_not_pinged_gets_no_last_ping():
    """An agent on this machine would then count its launcher as lost after a day."""
    watch = Watch()
    watch.pings.suspend(0.5)
    assert watch.pings.run_due(0.5) == 0.5
    assert watch.suspended == 1
    assert [node.handle.sent for node in watch.nodes] == [[]] * 3
