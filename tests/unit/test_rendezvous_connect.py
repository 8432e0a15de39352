"""How a node claims its place in a rendezvous, and what it says if the store does not hold its rendezvous."""

from __future__ import annotations

import re
import socket
from dataclasses import replace

import pytest

from ddplaunch.protocol.rendezvous import MemberSpec, RendezvousNotFound
from ddplaunch.rendezvous import connect
from ddplaunch.rendezvous.connect import Refused, agreed_id, claim_node_index, enter
from ddplaunch.rendezvous.signer import Signer
from tests.support.configs import rendezvous_config
from tests.support.memory_store import MemoryStore

CONFIG = rendezvous_config(
    node_index=1, port=0, is_server=False, join_timeout_s=1.0, last_call_timeout_s=1.0, lost_after_s=1.0
)
BY_LAUNCHER = MemberSpec(
    rendezvous=CONFIG, node_id="node2 x", run_id="job7", max_restarts=0, launcher_assigns_rendezvous=True
)
BY_HAND = replace(BY_LAUNCHER, launcher_assigns_rendezvous=False)


class SlowStore(MemoryStore):
    """``get`` waits in vain, though the key may be there when that is over."""

    def get(self, key: str) -> bytes:
        if self._timeout_s > 1:
            self._timeout_s = 1.0
            raise RuntimeError(f"wait timeout after 10000ms, keys: /{key}")
        return super().get(key)


def store_with(*keys: str) -> SlowStore:
    store = SlowStore()
    store.multi_set(keys, ["0123:job7"] * len(keys))
    return store


def entered(spec: MemberSpec, store: MemoryStore) -> Signer:
    return enter(spec, store)  # type: ignore[arg-type]


def test_where_one_launcher_leads_the_run_a_slow_node_is_not_another_run():
    with pytest.raises(RuntimeError, match="the node that serves the rendezvous has not opened it within 10 s"):
        entered(BY_LAUNCHER, store_with())


def test_at_an_endpoint_that_the_user_gave_it_is():
    with pytest.raises(Refused, match="another run uses this endpoint"):
        entered(BY_HAND, store_with("ddplaunch/job8/open"))


@pytest.mark.parametrize("spec", [BY_LAUNCHER, BY_HAND])
def test_a_rendezvous_that_is_opened_at_the_last_moment_is_joined(spec: MemberSpec):
    assert not entered(spec, store_with("ddplaunch/job7/open")).has_secret


def test_once_name_servers_are_ignored_a_host_has_its_last_known_addresses(monkeypatch: pytest.MonkeyPatch):
    search = connect._Search(BY_HAND)
    (family, kind, where), *_ = search._resolve("localhost", 7)
    assert where[1] == 7

    def fail(*_arguments: object, **_options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert search._resolve("localhost", 8)[0] == (family, kind, (where[0], 8, *where[2:]))
    with pytest.raises(socket.gaierror, match="not known"):
        search._resolve("node1", 7)


@pytest.mark.parametrize(("search_s", "join_s", "limit_s"), [(0.2, 600.0, 0.2), (60.0, 0.2, 0.2), (None, 0.2, 0.2)])
def test_the_message_about_a_search_has_the_limit_of_the_search(
    search_s: float | None, join_s: float, limit_s: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connect._Search, "_search_port", lambda *_: None)
    told: list[RendezvousNotFound] = []
    settings = replace(CONFIG, search_timeout_s=search_s, join_timeout_s=join_s)
    with pytest.raises(RuntimeError, match=f"after {limit_s:g} s"):
        connect.connect(replace(BY_HAND, rendezvous=settings), -1, told.append)
    assert [record.limit_s for record in told] == [limit_s]


# The secret.


def with_secret(spec: MemberSpec, secret: str, is_server: bool = False) -> MemberSpec:
    return replace(spec, rendezvous=replace(spec.rendezvous, secret=secret, is_server=is_server))


@pytest.mark.parametrize("spec", [BY_LAUNCHER, BY_HAND])
def test_nodes_with_one_secret_verify_each_others_records(spec: MemberSpec):
    store = MemoryStore()
    server = entered(with_secret(spec, "s" * 16, is_server=True), store)
    node = entered(with_secret(spec, "s" * 16), store)
    assert node.verify("key", server.sign("key", "text").encode()) == b"text"
    assert "s" * 16 not in str(store.values)


@pytest.mark.parametrize("secret", ["", "s" * 16])
def test_all_nodes_have_the_run_id_of_the_node_that_serves(secret: str):
    store = MemoryStore()
    server = entered(replace(with_secret(BY_HAND, secret, is_server=True), run_id="of:node1"), store)
    node = entered(replace(with_secret(BY_HAND, secret), run_id="of:node2"), store)
    assert agreed_id(node) == agreed_id(server)
    assert agreed_id(node)[0] == "of:node1"
    again = entered(replace(with_secret(BY_HAND, secret, is_server=True), run_id="of:node1"), MemoryStore())
    assert agreed_id(again)[1] != agreed_id(node)[1]


@pytest.mark.parametrize("opened", ["", "0123", "0123:", ":job7", "0123:../job7", "0123:.", "0123:a/b", "01/3:a"])
def test_what_cannot_name_a_folder_is_no_run_id(opened: str):
    store = MemoryStore()
    store.set("ddplaunch/job7/open", opened)
    with pytest.raises(RuntimeError, match="opened the rendezvous with an invalid text"):
        entered(BY_HAND, store)


def test_every_rendezvous_has_other_signatures():
    server = with_secret(BY_HAND, "s" * 16, is_server=True)
    first, second = (entered(server, MemoryStore()) for _ in range(2))
    assert second.verify("key", first.sign("key", "text").encode()) is None


@pytest.mark.parametrize(
    ("of_server", "of_node", "reason"),
    [
        ("s" * 16, "t" * 16, "the node that serves the rendezvous has another DDPLAUNCH_SECRET"),
        ("", "t" * 16, "the node that serves the rendezvous has no DDPLAUNCH_SECRET"),
        ("s" * 16, "", "the rendezvous accepts only nodes with its DDPLAUNCH_SECRET, and this node has none"),
    ],
)
def test_a_node_with_another_secret_is_told_so(of_server: str, of_node: str, reason: str):
    store = MemoryStore()
    entered(with_secret(BY_HAND, of_server, is_server=True), store)
    with pytest.raises(Refused, match=f"^{reason}$") as raised:
        entered(with_secret(BY_HAND, of_node), store)
    assert raised.value.hint == "Set DDPLAUNCH_SECRET to the same text on every node, or on none."
    with pytest.raises(RuntimeError, match="another process has changed the rendezvous"):
        entered(with_secret(BY_LAUNCHER, of_node), store)


def claimed(spec: MemberSpec, store: MemoryStore) -> int:
    return claim_node_index(spec, store)  # type: ignore[arg-type]


@pytest.fixture
def loss_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_LOSS_REPORTED_S", 0.01 - CONFIG.lost_after_s)


@pytest.mark.usefixtures("loss_is_known_at_once")
def test_a_node_rank_is_claimed_once():
    store = MemoryStore()
    assert claimed(BY_HAND, store) == 1
    with pytest.raises(Refused, match="node rank 1 is taken by node2"):
        claimed(replace(BY_HAND, node_id="node3 y"), store)


@pytest.mark.usefixtures("loss_is_known_at_once")
def test_a_lost_node_is_replaced_under_another_index():
    """Its old index may still be in use: a node that was cut off can come back."""
    store = MemoryStore()
    found = [claimed(BY_HAND, store)]
    for incarnation in "yz":
        store.set(connect.lost_key(BY_HAND, found[-1]), "1")
        found.append(claimed(replace(BY_HAND, node_id=f"node2 {incarnation}"), store))
    assert found == [1, 3, 5]
    with pytest.raises(Refused, match="node rank 1 is taken by node2"):
        claimed(replace(BY_HAND, node_id="node3 y"), store)


def test_a_node_without_a_rank_skips_the_claimed_ones():
    store = MemoryStore()
    claim_node_index(replace(BY_HAND, rendezvous=replace(CONFIG, node_index=0)), store)  # type: ignore[arg-type]
    by_arrival = replace(CONFIG, node_index=None)
    others = [MemberSpec(rendezvous=by_arrival, node_id=f"node{n} y", run_id="job7", max_restarts=0) for n in (3, 4)]
    assert [claim_node_index(other, store) for other in others] == [1, 2]  # type: ignore[arg-type]


@pytest.mark.usefixtures("loss_is_known_at_once")
def test_a_stranger_in_the_store_cannot_forge_a_line_of_a_message() -> None:
    store = MemoryStore()
    store.compare_set("ddplaunch/job7/claim/1", "", "gpu9\nddplaunch:\x1b[2J x")
    with pytest.raises(Refused, match=re.escape(r"is taken by gpu9\nddplaunch:\x1b[2J")):
        claim_node_index(BY_HAND, store)  # type: ignore[arg-type]
