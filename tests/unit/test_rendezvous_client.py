"""The messages of a node about its rendezvous."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from ddplaunch.agent.rendezvous.client import RendezvousClient
from ddplaunch.errors import LaunchError
from ddplaunch.protocol.rendezvous import MemberReady, WaitingNodes
from tests.support import golden
from tests.support.configs import agent_spec, rendezvous_config

READY = MemberReady(1, "127.0.0.1", 29400, "job7", "key")


@pytest.fixture
def client() -> RendezvousClient:
    config = rendezvous_config(server_addresses=("127.0.0.1",), is_server=False)
    return RendezvousClient(agent_spec(host="gpu1"), config)


def waiting(client: RendezvousClient, count: int, missing: int) -> str:
    client.on_ready(READY)
    client.waiting_nodes = WaitingNodes("gpu1", count, missing)
    return client.too_few_error().message


def both(error: LaunchError) -> str:
    return f"{error.message}\n{error.hint}"


def test_the_messages_of_a_node(client: RendezvousClient) -> None:
    pages = {
        "it searches": client.search_message("nothing answers there", 600.0),
    }
    client.lost_reason = "nothing answers there"
    pages["it has never been there"] = both(client.unreachable_error())
    client.on_ready(READY)
    pages["it has been there"] = both(client.unreachable_error())
    for who, starts in (("one launcher", True), ("launchers", False)):
        client._spec = agent_spec(host="gpu1", launcher_assigns_rendezvous=starts)
        pages[f"nodes are missing that {who} start"] = both(client.too_few_error())
    for name, count, missing in (("one is missing", 1, 1), ("none is missing", 2, 0)):
        pages[name] = waiting(client, count, missing)
    client.config = replace(client.config, node_index=0)
    pages["another has its node rank"] = client.equal_ranks_message("gpu0")
    without_addresses = {name: re.sub(r"gpu1 \(.*?\)", "gpu1 (<addresses>)", text) for name, text in pages.items()}
    golden.check("rendezvous_messages", without_addresses)


def test_a_node_that_cannot_open_its_own_rendezvous_misses_nobody() -> None:
    config = rendezvous_config(server_addresses=("127.0.0.1",), port=0, is_server=True, min_nodes=1)
    client = RendezvousClient(agent_spec(host="gpu1"), config)
    message = client.too_few_error().message
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
