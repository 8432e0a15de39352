"""Members and coordinator of a rendezvous, and a stranger who reaches its store: what he writes has no effect."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import AssignNodes, NodeSilent
from ddplaunch.protocol.rendezvous import (
    ListenForWorkersStore,
    MemberReady,
    MemberSpec,
    NodeLeft,
    NodeReady,
    RecordsRejected,
    RendezvousLost,
    RoundFormed,
    WorkersEnded,
    WorkersStoreListens,
)
from ddplaunch.rendezvous.connect import claim_node_index, enter
from ddplaunch.rendezvous.member import Member
from tests.support.configs import rendezvous_config
from tests.support.memory_store import MemoryStore
from tests.support.processes import wait_until

CONFIG = rendezvous_config(
    node_index=0,
    server_addresses=("10.0.0.1",),
    port=1,
    is_server=True,
    join_timeout_s=10.0,
    last_call_timeout_s=0.0,
    silent_after_s=30.0,
    secret="sixteen letters!",
)
PREFIX = "ddplaunch/job7"


class Node:
    """A node's member, and this test in place of its agent."""

    def __init__(self, index: int, store: MemoryStore, **settings: Any) -> None:
        config = replace(CONFIG, node_index=index, is_server=index == 0, **settings)
        spec = MemberSpec(
            rendezvous=config,
            node_id=f"node{index}",
            run_id="job7",
            max_restarts=0,
            one_launcher_leads=bool(config.assigned),
        )
        self.index = index
        self.received: list[Any] = []
        ours, theirs = socket.socketpair()
        self._channel = ours.makefile("wb")
        ours.close()
        signer = enter(spec, store)  # type: ignore[arg-type]
        ready = MemberReady(claim_node_index(spec, store)[0], "10.0.0.1", 1, "job7", "key")  # type: ignore[arg-type]
        member = Member(spec, ready, store, signer, theirs.makefile("rb"), self.received.append)  # type: ignore[arg-type]
        theirs.close()
        self._thread = threading.Thread(target=member.run, daemon=True)
        self._thread.start()

    def send(self, record: object) -> None:
        self._channel.write(wire.encode(record))
        self._channel.flush()

    def join(self) -> None:
        self.send(NodeReady(self.index, f"node{self.index}", 1))

    def wait_for(self, kind: type) -> Any:
        return wait_until(lambda: [record for record in self.received if isinstance(record, kind)])[-1]

    def close(self) -> None:
        self._channel.close()
        self._thread.join(5)


@pytest.fixture
def make_nodes() -> Iterator[Callable[..., list[Node]]]:
    """``make_nodes(store)``: two nodes; the first one coordinates."""
    with contextlib.ExitStack() as stack:

        def make(store: MemoryStore, **settings: Any) -> list[Node]:
            nodes = [Node(index, store.clone(), **settings) for index in range(2)]
            for node in nodes:
                stack.callback(node.close)
            return nodes

        yield make


def start_round(nodes: list[Node]) -> list[str]:
    """All nodes join. Returns the address of the workers' store that each of them got."""
    for node in nodes:
        node.join()
    attempt = nodes[0].wait_for(ListenForWorkersStore).attempt
    nodes[0].send(WorkersStoreListens(0, attempt, "10.0.0.1", 1234))
    return [node.wait_for(RoundFormed).round.master_addr for node in nodes]


def post(store: MemoryStore, record: object) -> None:
    """Write into the coordinator's box, as a node without a secret does."""
    store.set(f"{PREFIX}/in/{store.add(f'{PREFIX}/in/count', 1)}", wire.encode(record).decode())


@pytest.mark.parametrize("secret", ["", CONFIG.secret])
def test_a_node_that_dies_before_it_writes_what_it_has_announced_stops_nobody(
    make_nodes: Callable[..., list[Node]], secret: str
):
    store = MemoryStore()
    nodes = make_nodes(store, silent_after_s=1.5, secret=secret)
    store.add(f"{PREFIX}/in/count", 1)
    assert start_round(nodes) == ["10.0.0.1", "10.0.0.1"]
    assert not any(isinstance(record, RecordsRejected) for node in nodes for record in node.received)


@pytest.mark.parametrize("text", ["no record", '["NodeReady", {"node_index": "x"}]', "", "x" * 100_000])
def test_a_malformed_record_of_a_run_without_a_secret_is_ignored_and_counted(
    make_nodes: Callable[..., list[Node]], text: str
):
    store = MemoryStore()
    for box in ("in", "to/1"):
        store.set(f"{PREFIX}/{box}/1", text)
    store.add(f"{PREFIX}/in/count", 1)
    nodes = make_nodes(store, secret="")
    assert start_round(nodes) == ["10.0.0.1", "10.0.0.1"]
    assert [node.wait_for(RecordsRejected) for node in nodes] == [RecordsRejected(1)] * 2


def test_a_node_does_not_follow_the_records_of_an_earlier_run_with_its_secret_and_run_id(
    make_nodes: Callable[..., list[Node]],
):
    store, impostor = MemoryStore(), MemoryStore()
    start_round(make_nodes(store))
    impostor.values |= {key: value for key, value in store.values.items() if "/open" in key or "/to/" in key}
    node = Node(1, impostor)
    node.join()
    assert node.wait_for(RecordsRejected)
    node.close()
    assert not any(isinstance(record, RoundFormed) for record in node.received)


def test_a_flood_is_reported_once_per_heartbeat(make_nodes: Callable[..., list[Node]]):
    store = MemoryStore()
    nodes = make_nodes(store)
    for _ in range(1000):
        post(store, WorkersEnded(0, "failed", node_index=1))
    assert start_round(nodes) == ["10.0.0.1", "10.0.0.1"]
    assert wait_until(lambda: nodes[0].wait_for(RecordsRejected).count == 1000)
    assert sum(isinstance(record, RecordsRejected) for record in nodes[0].received) <= 5


def test_only_the_agent_of_the_node_that_serves_assigns_nodes(make_nodes: Callable[..., list[Node]]):
    nodes = make_nodes(MemoryStore(), assigned=(0, 7))
    nodes[1].send(AssignNodes("job7", (1,)))
    nodes[0].send(AssignNodes("job7", (0, 1)))
    assert start_round(nodes) == ["10.0.0.1", "10.0.0.1"]


def test_the_silence_of_a_node_that_the_launcher_has_given_up_loses_no_rendezvous(
    make_nodes: Callable[..., list[Node]],
):
    """Its record may arrive after that of the launcher."""
    store = MemoryStore()
    first, second = make_nodes(store, silent_after_s=1.5, assigned=(0, 1))
    first.send(NodeReady(7, "given up", 1))
    first.send(NodeReady(1, "node1", 1))
    second.close()
    assert first.wait_for(NodeSilent) == NodeSilent("job7", 1, 1.5)
    assert len([record for record in first.received if isinstance(record, NodeSilent)]) == 1
    assert not any(isinstance(record, RendezvousLost) for record in first.received), "its own rendezvous works"


def test_a_node_that_leaves_may_be_replaced(make_nodes: Callable[..., list[Node]]):
    store = MemoryStore()
    nodes = make_nodes(store)
    start_round(nodes)
    nodes[1].send(NodeLeft(1))
    settings = replace(CONFIG, node_index=1, is_server=False)
    again = MemberSpec(rendezvous=settings, node_id="node1 again", run_id="job7", max_restarts=0)
    assert claim_node_index(again, store.clone()) == (3, "")  # type: ignore[arg-type]
