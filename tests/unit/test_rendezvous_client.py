"""The messages of a node about its rendezvous."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ddplaunch.agent.rendezvous.client import RendezvousClient
from ddplaunch.protocol.rendezvous import MemberReady, NodeTurnedAway, WaitingNodes
from tests.support.configs import rendezvous_config


@pytest.fixture
def client() -> RendezvousClient:
    config = rendezvous_config(server_addresses=("127.0.0.1",), is_server=False)
    return RendezvousClient("gpu1", config)


def test_a_search_names_the_reason_and_its_limit(client: RendezvousClient) -> None:
    text = client.search_message("nothing answers there", 600.0)
    assert "has not found the rendezvous at 127.0.0.1:29400: nothing answers there; the search goes on" in text
    assert text.endswith("for up to 600 s")


def test_a_rendezvous_that_is_lost_is_not_one_that_was_never_found(client: RendezvousClient) -> None:
    client.lost_reason = "nothing answers there"
    assert "cannot join the other nodes" in client.unreachable_error()[0]
    client.on_ready(MemberReady(1, "127.0.0.1", 29400, "job7", "key"))
    message, hint = client.unreachable_error()
    assert message == "gpu1 has lost the rendezvous at 127.0.0.1:29400: nothing answers there"
    assert "still run" in hint


@pytest.mark.parametrize(("launcher_starts_nodes", "remedy"), [(True, "--interface"), (False, "--rdzv-id")])
def test_the_remedy_for_missing_nodes_depends_on_who_starts_them(
    client: RendezvousClient, launcher_starts_nodes: bool, remedy: str
) -> None:
    client.on_ready(MemberReady(1, "127.0.0.1", 29400, "job7", "key"))
    message, hint = client.too_few_error(launcher_starts_nodes=launcher_starts_nodes)
    assert "only these nodes have joined" in message
    assert remedy in hint


def waiting(client: RendezvousClient, count: int, missing: int) -> str:
    client.on_ready(MemberReady(1, "127.0.0.1", 29400, "job7", "key"))
    client.waiting_nodes = WaitingNodes("gpu1", count, missing)
    return client.too_few_error(launcher_starts_nodes=False)[0]


def test_only_is_said_only_if_nodes_are_missing(client: RendezvousClient) -> None:
    assert waiting(client, 1, 1).endswith("only these nodes have joined at 127.0.0.1:29400: gpu1; 2 are needed")
    assert waiting(client, 2, 0) == "after 630 s no attempt has begun at 127.0.0.1:29400: gpu1"


def test_a_node_that_cannot_open_its_own_rendezvous_misses_nobody() -> None:
    config = rendezvous_config(server_addresses=("127.0.0.1",), port=0, is_server=True, min_nodes=1)
    client = RendezvousClient("gpu1", config)
    message, _ = client.too_few_error(launcher_starts_nodes=False)
    client.close()
    assert message == f"gpu1 serves the rendezvous at {client.endpoint}, which did not open in 600 s"


def test_the_time_for_more_nodes_is_not_part_of_that_for_enough(
    client: RendezvousClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.join_deadline() == float("inf")
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    client.start_clock()
    assert client.join_deadline() == 1600
    waiting(client, 1, 1)
    assert client.join_deadline() == 1600
    waiting(client, 2, 0)
    assert client.join_deadline() == 1630
    client.is_spare = True
    assert client.join_deadline() == float("inf")


def test_equal_node_ranks_are_explained(client: RendezvousClient) -> None:
    client.config = replace(client.config, node_index=0)
    assert client.equal_ranks_message("gpu0").startswith("warning: gpu1 and gpu0 have the same --node-rank, 0: ")


@pytest.mark.parametrize(("differs", "what"), [("run_id", "--rdzv-id"), ("secret", "DDPLAUNCH_SECRET")])
def test_the_node_that_serves_says_who_was_turned_away(client: RendezvousClient, differs: str, what: str) -> None:
    text = client.turned_away_message(NodeTurnedAway("gpu9", differs))  # type: ignore[arg-type]
    assert text == f"gpu9 cannot join at 127.0.0.1:29400: it has another {what} than this node"
