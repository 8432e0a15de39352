"""What a launcher says of its nodes reaches the coordinator, in whatever order rendezvous move and agents join them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.rendezvous import multi_node
from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous
from ddplaunch.config import RendezvousConfig
from ddplaunch.errors import LaunchError
from ddplaunch.protocol.launcher_agent import AssignNodes, JoinRendezvous
from ddplaunch.protocol.rendezvous import RoundFormed, WaitingNodes
from ddplaunch.rounds.coordinator import Coordinator
from ddplaunch.rounds.restarts import Restarts
from tests.support.configs import a_round, agent_spec, rendezvous_config
from tests.support.fake_agents import participants_of
from tests.support.members import READY

CONFIG = rendezvous_config(token="run", min_nodes=1, max_nodes=4)
SPEC = agent_spec(host="node0", one_launcher_leads=True)


class FakeClient:
    """A client whose member is the coordinator, at once."""

    def __init__(self, node: Any, config: RendezvousConfig) -> None:
        self.config, self._node = config, node
        self.ready, self.is_server, self.lost_reason, self.cannot_start = READY, True, None, None
        self.has_no_place = False
        self.waiting_nodes = WaitingNodes("node0", 4, 0)
        self.formed: RoundFormed | None = None
        self.verdict = None
        self.coordinator: Coordinator | None = None
        self._node.clients.append(self)

    def connect(self) -> None:
        config = self.config
        self.coordinator = Coordinator(0, 1, 4, Restarts(0), config.assigned, departing=config.departing)
        self._node.start_member([])

    def join(self, *_: object) -> None:
        """Only one round is formed: the next one waits for all that the launcher says."""
        self.formed = self._node.rounds.pop() if self._node.rounds else None

    def take_store_listener(self) -> None: ...

    def too_few_error(self) -> LaunchError:
        return LaunchError("all records have arrived", "")

    def send(self, record: object) -> None:
        assert isinstance(record, AssignNodes)
        assert record.token == self.config.token, "a coordinator gets what concerns its own rendezvous"
        assert self.coordinator, "there is a process that reads it"
        self.coordinator.receive(record)

    def close(self) -> None:
        self.coordinator = None


class Launcher:
    """Three nodes besides the one that serves; what it has sent to that one."""

    def __init__(self) -> None:
        self.participants = participants_of((1, 4), "a", "b", "c", "d", rendezvous=CONFIG)
        self._nodes = self.participants.nodes
        for node in self._nodes.all:
            self._nodes.on_agent_connected(node)
        self.participants.check_and_announce()

    @property
    def sent(self) -> list[object]:
        handle: Any = self._nodes.all[0].handle
        return list(filter(None, handle.sent))  # Without its AgentSpec.

    def lose(self, index: int) -> None:
        self.participants.replace_or_shrink(self._nodes.all[index])

    def move(self) -> None:
        self.participants.begin_new_rendezvous(self._nodes.all[3], "its member has ended")

    def drain(self) -> None:
        self.participants.set_departing({3: "drained"})


ACTIONS: Sequence[Callable[[Launcher], None]] = (
    lambda launcher: launcher.lose(1),
    lambda launcher: launcher.lose(2),
    Launcher.move,
    Launcher.move,
    Launcher.drain,
)


def records_of(order: Sequence[Callable[[Launcher], None]]) -> tuple[Launcher, list[object]]:
    launcher = Launcher()
    for act in order:
        act(launcher)
    return launcher, launcher.sent


def agent_after(records: Sequence[object], joins_after: int, during_start: int) -> Any:
    """The client of an agent that got these records: so many before its workers ended, and so many as a member starts.

    ``joins_after`` counts from the first rendezvous, which it has joined.
    """
    queue = list(records)

    def deliver(count: int) -> None:
        for record in [queue.pop(0) for _ in range(min(count, len(queue)))]:
            rendezvous.handle_event(record)

    def wait(is_done: Callable[[], bool], _deadline: object) -> bool:
        while not is_done() and queue:
            deliver(1)
        return is_done()

    node: Any = SimpleNamespace(
        spec=SPEC,
        wait=wait,
        is_stopping=lambda: False,
        saved=lambda: None,
        start_member=lambda _fds: deliver(during_start),
        clients=[],
        rounds=[RoundFormed(a_round())],
    )
    rendezvous = MultiNodeRendezvous(node, 1)
    assert rendezvous.next_round()
    deliver(joins_after)
    with pytest.raises(LaunchError, match="all records have arrived"):
        rendezvous.next_round()
    return node.clients[-1]


def test_the_coordinator_knows_what_the_launcher_knows_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_node, "RendezvousClient", FakeClient)
    for order in set(permutations(ACTIONS)):
        launcher, records = records_of(order)
        for joins_after in range(len(records) + 1):
            for during_start in range(4):
                client = agent_after(records, joins_after, during_start)
                known = client.coordinator.assigned, tuple(client.coordinator.departing)
                assert client.config.token == launcher.participants.token
                assert known == (tuple(launcher.participants.indices), (3,)), (records, joins_after, during_start)


def test_what_concerns_a_rendezvous_that_was_left_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_node, "RendezvousClient", FakeClient)
    launcher = Launcher()
    launcher.move()
    client = agent_after([*launcher.sent, AssignNodes("run#1", (0,))], 0, 0)
    assert client.coordinator.assigned == (0, 1, 2, 3)
    next_one = JoinRendezvous(replace(CONFIG, token="run#2", assigned=(0, 1)))
    client = agent_after([*launcher.sent, next_one, AssignNodes("run#1", (0,))], len(launcher.sent) + 2, 0)
    assert client.coordinator.assigned == (0, 1)
