"""How a node claims its place in a rendezvous, and what it says if the store does not hold its rendezvous."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace

import pytest

from ddplaunch.protocol.rendezvous import MemberSpec, RendezvousNotFound
from ddplaunch.rendezvous import connect
from ddplaunch.rendezvous.connect import JoinRefused, agreed_id, claim_node_index, enter
from ddplaunch.rendezvous.store import Signer
from tests.support import golden
from tests.support.configs import rendezvous_config
from tests.support.memory_store import MemoryStore

CONFIG = rendezvous_config(
    node_index=1, port=0, is_server=False, join_timeout_s=1.0, last_call_timeout_s=1.0, silent_after_s=1.0
)
BY_LAUNCHER = MemberSpec(rendezvous=CONFIG, node_id="node2 x", run_id="job7", max_restarts=0, one_launcher_leads=True)
BY_HAND = replace(BY_LAUNCHER, one_launcher_leads=False)


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
    with pytest.raises(JoinRefused, match="another run uses this endpoint"):
        entered(BY_HAND, store_with("ddplaunch/job8/open"))


def test_a_store_that_is_found_while_its_host_is_asked_ends_the_search(monkeypatch: pytest.MonkeyPatch):
    search, is_asking, may_end = connect._Search(BY_HAND), threading.Event(), threading.Event()
    found = (store_with(), "10.0.0.1", 1)

    def ask(*_: object) -> None:
        is_asking.set()
        assert may_end.wait(5.0), "the search waits for this answer"

    def search_port(port: int) -> None:
        search._note_answer(port, answers=True, is_refused=False)
        is_asking.wait(10.0)
        search._found.post(found)  # type: ignore[arg-type]

    monkeypatch.setattr(connect, "ask_whether_it_comes", ask)
    monkeypatch.setattr(connect, "_REPORT_AFTER_S", 0.01)
    monkeypatch.setattr(search, "_search_port", search_port)
    reported: list[RendezvousNotFound] = []
    assert search.find_store(reported.append) == found
    may_end.set()
    assert len(reported) == 1


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


def test_a_node_that_serves_and_still_imports_torch_has_the_time_to_join():
    with socket.create_server(("127.0.0.1", 0)) as importing:
        where = replace(BY_HAND.rendezvous, server_addresses=("127.0.0.1",), port=importing.getsockname()[1])
        settings = replace(where, is_server=False, other_ports=(), search_timeout_s=0.5, join_timeout_s=1.5)
        with pytest.raises(RuntimeError, match=r"does not serve a rendezvous \(yet\), after 1.5 s"):
            connect.connect(replace(BY_HAND, rendezvous=settings), -1, lambda _: None)


def test_a_process_that_has_answered_and_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connect, "_SERVER_GONE_S", 0.3)
    serving = socket.create_server(("127.0.0.1", 0))
    where = replace(BY_HAND.rendezvous, server_addresses=("127.0.0.1",), port=serving.getsockname()[1])
    monkeypatch.setattr(connect._Search, "_store_of_run", lambda *_: serving.close())
    with pytest.raises(RuntimeError, match="refused\\); the process that had answered there has ended"):
        connect.connect(replace(BY_HAND, rendezvous=replace(where, join_timeout_s=60.0)), -1, lambda _: None)


def test_a_process_whose_queue_is_full_has_not_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connect, "_SERVER_GONE_S", 0.1)
    monkeypatch.setattr(connect, "_PROBE_S", 0.1)
    with contextlib.ExitStack() as stack:
        importing = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
        where = replace(BY_HAND.rendezvous, server_addresses=("127.0.0.1",), port=importing.getsockname()[1])

        def fill_the_queue(*_: object) -> None:
            for _ in range(4):
                other = stack.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(importing.getsockname())

        monkeypatch.setattr(connect._Search, "_store_of_run", fill_the_queue)
        with pytest.raises(RuntimeError, match=r"\(connection timed out\), after 2 s"):
            connect.connect(replace(BY_HAND, rendezvous=replace(where, join_timeout_s=2.0)), -1, lambda _: None)


@pytest.mark.parametrize(("spec", "nodes", "count"), [(BY_HAND, 2, 2), (BY_HAND, 1000, 1), (BY_LAUNCHER, 2, 0)])
def test_the_more_nodes_the_less_often_each_asks_whether_the_one_that_serves_comes(
    spec: MemberSpec, nodes: int, count: int, monkeypatch: pytest.MonkeyPatch
):
    """Never where one launcher leads all nodes, which stops them itself."""
    asked: list[int] = []
    monkeypatch.setattr(connect, "_LAST_PAUSE_S", 0.1)
    monkeypatch.setattr(connect, "ask_whether_it_comes", lambda _spec, _address, port: asked.append(port))
    monkeypatch.setattr(connect._Search, "_store_of_run", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as importing:
        where = replace(spec.rendezvous, server_addresses=("127.0.0.1",), port=importing.getsockname()[1])
        settings = replace(where, min_nodes=nodes, max_nodes=nodes, join_timeout_s=2.0)
        with pytest.raises(RuntimeError, match="after 2 s"):
            connect.connect(replace(spec, rendezvous=settings), -1, lambda _: None)
    assert min(len(asked), 2) == count


# The secret.


def with_secret(spec: MemberSpec, secret: str, is_server: bool = False) -> MemberSpec:
    return replace(spec, rendezvous=replace(spec.rendezvous, secret=secret, is_server=is_server))


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


def test_a_node_that_is_turned_away_is_told_so_and_the_node_that_serves_reads_it():
    """A question is the secrets of the node that serves and of another, and the run id of that one."""

    def told(question: str) -> str:
        of_server, of_node, token = (word.removeprefix("none") for word in question.split())
        store = SlowStore()
        entered(with_secret(BY_HAND, of_server * 16, is_server=True), store)
        assert connect.read_note(store, "here:29400") is None  # type: ignore[arg-type]
        spec = with_secret(replace(BY_HAND, node_id="gpu9\x1b x"), of_node * 16)
        with pytest.raises(JoinRefused) as raised:
            entered(replace(spec, rendezvous=replace(spec.rendezvous, token=token)), store)
        if token == "job7":  # Where one launcher leads the run, it has given all nodes one secret.
            with pytest.raises(RuntimeError, match="another process has changed the rendezvous"):
                entered(with_secret(BY_LAUNCHER, of_node * 16), store)
        return f"{raised.value} | {raised.value.hint} | {connect.read_note(store, 'here:29400')}"  # type: ignore[arg-type]

    golden.check_answers("turned_away", told)


def claimed(spec: MemberSpec, store: MemoryStore) -> tuple[int, str]:
    return claim_node_index(spec, store)  # type: ignore[arg-type]


def ranked(rank: int | None, name: str, max_nodes: int = 4) -> MemberSpec:
    """A node with this node rank, whose loss would be reported at once."""
    config = replace(CONFIG, node_index=rank, max_nodes=max_nodes, silent_after_s=0.01 - connect._LOSS_REPORTED_S)
    return replace(BY_HAND, rendezvous=config, node_id=name)


def test_a_node_that_lives_is_not_waited_for():
    """Its next heartbeat decides, not the time after which it would count as lost: an hour here."""
    store = MemoryStore()
    spec = replace(BY_HAND, rendezvous=replace(CONFIG, silent_after_s=3600.0, join_timeout_s=7200.0))
    assert claimed(spec, store) == (1, "")
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.01):
            store.add(connect.beat_key(spec, 1), 1)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert claimed(replace(spec, node_id="node3 y"), store) == (3, "node2")
    finally:
        is_over.set()
        thread.join()


def test_a_lost_node_is_replaced_under_another_index():
    """Its old index may still be in use: a node that was cut off can come back."""
    store = MemoryStore()
    found = [claimed(ranked(1, "node2 x", 2), store)]
    for incarnation in "yz":
        store.set(connect.lost_key(BY_HAND, found[-1][0]), "1")
        found.append(claimed(ranked(1, f"node2 {incarnation}", 2), store))
    assert found == [(1, ""), (3, ""), (5, "")]
    assert claimed(ranked(1, "node3 y", 2), store) == (7, "node2")


def test_a_stranger_in_the_store_cannot_forge_a_line_of_a_message() -> None:
    store = MemoryStore()
    store.compare_set("ddplaunch/job7/claim/1", "", "gpu9\nddplaunch:\x1b[2J x")
    assert claimed(ranked(1, "node2 x"), store)[1] == r"gpu9\nddplaunch:\x1b[2J"


# A node that is turned away.


def test_a_note_of_a_stranger_is_limited():
    store = MemoryStore()
    store.set("ddplaunch/turned_away", "anything " + "x" * 10_000)
    note = connect.read_note(store, "here:29400")  # type: ignore[arg-type]
    assert note
    assert len(note.text) < 200


def test_a_node_without_a_rank_skips_the_claimed_ones():
    store = MemoryStore()
    claimed(ranked(0, "node2 x"), store)
    assert [claimed(ranked(None, f"node{n} y"), store) for n in (3, 4)] == [(1, ""), (2, "")]
