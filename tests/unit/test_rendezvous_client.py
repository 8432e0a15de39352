"""The messages of a node about its rendezvous."""

from __future__ import annotations

import pytest

from ddplaunch.agent.rendezvous.client import RendezvousClient
from ddplaunch.protocol.rendezvous import MemberReady
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
