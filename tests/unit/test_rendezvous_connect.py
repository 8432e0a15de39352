"""How a node claims its place in a rendezvous, and what it says if the store does not hold its rendezvous."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import timedelta

import pytest

from ddplaunch.config import RendezvousConfig
from ddplaunch.protocol.rendezvous import MemberSpec
from ddplaunch.rendezvous import connect
from ddplaunch.rendezvous.connect import Refused, claim_node_index

CONFIG = RendezvousConfig(
    token="job7",
    min_nodes=2,
    max_nodes=2,
    node_rank=1,
    hosts=("node1",),
    port=0,
    is_server=False,
    local_addr=None,
    interface=None,
    join_timeout_s=1.0,
    last_call_s=1.0,
    lost_after_s=1.0,
)
BY_LAUNCHER = MemberSpec(rendezvous=CONFIG, node_id="node2 x", max_restarts=0, launcher_assigns_rendezvous=True)
BY_HAND = replace(BY_LAUNCHER, launcher_assigns_rendezvous=False)


class Store:
    """A store in which ``get`` waits in vain; ``keys`` are there when that is over."""

    def __init__(self, *keys: str) -> None:
        self.keys = dict.fromkeys(keys, "")

    def set_timeout(self, _timeout: timedelta) -> None: ...

    def get(self, key: str) -> bytes:
        raise RuntimeError(f"wait timeout after 10000ms, keys: /{key}")

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def compare_set(self, key: str, _expected: str, desired: str) -> bytes:
        return self.keys.setdefault(key, desired).encode()


def claim(spec: MemberSpec, store: Store) -> int:
    return claim_node_index(spec, store)  # type: ignore[arg-type]


def test_where_one_launcher_leads_the_run_a_slow_node_is_not_another_run():
    with pytest.raises(RuntimeError, match="the node that serves the rendezvous has not opened it within 10 s"):
        claim(BY_LAUNCHER, Store())


def test_at_an_endpoint_that_the_user_gave_it_is():
    with pytest.raises(Refused, match="another run uses this endpoint"):
        claim(BY_HAND, Store("ddplaunch/job8/open"))


@pytest.mark.parametrize("spec", [BY_LAUNCHER, BY_HAND])
def test_a_rendezvous_that_is_opened_at_the_last_moment_is_joined(spec: MemberSpec):
    assert claim(spec, Store("ddplaunch/job7/open")) == 1


def test_once_name_servers_are_ignored_a_host_has_its_last_known_addresses(monkeypatch: pytest.MonkeyPatch):
    search = connect._Search(BY_HAND)
    found = search._resolve("localhost", 7)

    def fail(*_arguments: object, **_options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert search._resolve("localhost", 7) == found
    with pytest.raises(socket.gaierror, match="not known"):
        search._resolve("node1", 7)
