"""Which nodes are pinged, when, and which are silent; times are made up, and the test is the thread that pings."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from ddplaunch.errors import LaunchError
from ddplaunch.launcher import pings
from ddplaunch.launcher.nodes import Node, NodeState
from ddplaunch.launcher.pings import INTERVAL_S, Pings
from ddplaunch.protocol.launcher_agent import Ping, Pong
from tests.support.fake_agents import FakeHandle
from tests.support.processes import wait_until


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pings._Sender, "_run", lambda _: None)


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
            self.pings.on_pong(self.nodes[0], Pong(), second)
            self.pings.run_due(second)
        return self.silent


def sent(node: Node) -> list[Ping]:
    return node.handle.sent  # type: ignore[attr-defined,no-any-return]


def limits_s(node: Node) -> list[float]:
    """What the node was told with each ping."""
    return [ping.lost_after_s for ping in sent(node)]


def answer(watch: Watch, node: Node, now: float, number: int = -1) -> None:
    """The node answers one of its pings, the last one if ``number`` is -1."""
    watch.pings.on_pong(node, Pong(sent(node)[number].time_s), now)


def test_every_node_is_pinged_at_once_and_all_of_them_together_afterwards():
    watch = Watch()
    for number, node in enumerate(watch.nodes):
        watch.pings.watch(node, 0.1 * number)
        assert limits_s(node) == [5.0]
        assert watch.pings.run_due(0.1 * number) == INTERVAL_S
    assert watch.pings.run_due(INTERVAL_S) == 2 * INTERVAL_S
    watch.pings._sender.beat()
    assert [limits_s(node) for node in watch.nodes] == [[5.0] * 2] * 3


def test_a_node_without_an_agent_and_one_that_was_reported_are_not_pinged():
    watch = Watch(2)
    assert watch.beat(1, 6) == [watch.nodes[1]]
    watch.nodes[0].state = NodeState.DONE
    watch.pings.watch(watch.nodes[2], 6.0)
    watch.pings._sender.beat()
    assert [len(sent(node)) for node in watch.nodes] == [1, 1, 2]


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


def test_a_node_is_not_silent_while_its_answer_may_wait_behind_a_large_record():
    """All nodes may send a megabyte at once, which is decoded one after the other."""
    watch = Watch(2)
    handle = watch.nodes[1].handle
    handle.delayed_until = float("inf")
    assert watch.beat(1, 20) == []
    handle.delayed_until = 20.0
    assert watch.beat(21, 25) == []
    assert watch.beat(26, 26) == [watch.nodes[1]]


def test_after_a_stop_of_this_process_all_nodes_have_time_again():
    watch = Watch(1)
    for now in (100.0, 101.0):
        watch.pings.run_due(now)
    assert watch.silent == []


def test_a_suspension_waits_until_the_agents_know_of_it():
    watch = Watch(3)
    watch.pings.suspend(0.5)
    for node in watch.nodes:
        answer(watch, node, 0.6, number=0)  # The ping before: this agent does not know of it yet.
    for node in watch.nodes:
        assert watch.pings.run_due(0.6) == 0.5 + pings._SUSPEND_WAIT_S
        assert watch.suspended == 0
        answer(watch, node, 0.6)
    assert watch.pings.run_due(0.7) == 0.7
    assert watch.suspended == 1


def test_no_ping_follows_the_last_one_before_a_suspension_and_one_follows_it_at_once():
    watch = Watch(1)
    watch.pings.suspend(0.5)
    watch.pings._sender.beat()
    watch.pings.watch(watch.nodes[1], 0.6)
    assert [limits_s(node) for node in watch.nodes[:2]] == [[5.0, 86400.0], [86400.0]]
    watch.pings.run_due(10.0)
    assert [limits_s(node)[-1] for node in watch.nodes[:2]] == [5.0, 5.0]


def test_an_agent_that_is_not_pinged_gets_no_last_ping():
    """An agent on this machine would then count its launcher as lost after a day."""
    watch = Watch()
    watch.pings.suspend(0.5)
    assert watch.pings.run_due(0.5) == 0.5
    assert watch.suspended == 1
    assert [node.handle.sent for node in watch.nodes] == [[]] * 3


def test_pings_are_sent_by_a_thread_whatever_the_main_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(pings, "INTERVAL_S", 0.01)
    watch = Watch(3)
    wait_until(lambda: all(len(sent(node)) > 10 for node in watch.nodes))  # run_due is never called.
    watch.pings.close()
    counts = [len(sent(node)) for node in watch.nodes]
    assert watch.pings._sender._thread
    assert not watch.pings._sender._thread.is_alive()
    assert [len(sent(node)) for node in watch.nodes] == counts


def test_a_launcher_without_room_for_the_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_room)
    with pytest.raises(LaunchError, match="cannot ping its nodes: can't start new thread"):
        Watch(1)
