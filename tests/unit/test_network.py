"""Which node serves: the one whose address the endpoint is, found by binding; names need not agree."""

from __future__ import annotations

import socket

import pytest

from ddplaunch.config import RendezvousConfig
from ddplaunch.errors import LaunchError
from ddplaunch.system import network
from tests.support.configs import rendezvous_config


def meeting(host: str, port: int = 0, is_server: bool | None = None) -> RendezvousConfig:
    return rendezvous_config(server_addresses=(host,), port=port, is_server=is_server)


def serves(where: RendezvousConfig) -> bool:
    listener, _ = network.bind_endpoint("here", where)
    if listener:
        listener.close()
    return listener is not None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9"])
def test_any_name_of_an_own_address_serves(host: str):
    """torchrun: rendezvous 4."""
    assert serves(meeting(host))
    assert network.is_local(host)


@pytest.mark.parametrize("host", ["192.0.2.77", "198.51.100.1"])
def test_the_address_of_another_node_does_not(host: str):
    """torchrun: rendezvous 4."""
    assert not serves(meeting(host))
    assert not network.is_local(host)
    with pytest.raises(
        LaunchError, match=f"here cannot listen at {host}:0: Cannot assign requested address; its addresses: "
    ):
        serves(meeting(host, is_server=True))


def test_who_is_told_not_to_serve_does_not_and_one_that_comes_second_is_a_client():
    """torchrun: rendezvous 5."""
    assert not serves(meeting("localhost", is_server=False))
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        assert not serves(meeting("127.0.0.1", port))
        with pytest.raises(LaunchError, match="Address already in use"):
            serves(meeting("127.0.0.1", port, is_server=True))
