"""Many hosts that get the code: who gets it from whom, and what a host takes from another one and what it does not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.features.remote import tls
from ddplaunch.features.snapshot import content, peers, receive
from ddplaunch.features.snapshot.queries import CopyAnswer, GiveFiles, Giving, Source
from ddplaunch.features.snapshot.spread import Spread
from ddplaunch.features.ssh.listener import new_identity
from tests.support.repositories import repository
from tests.unit.test_sync import Sender

SOURCE = Source(("a",), 1, "", "")
BIG = 1 << 30


def placed(spread: Spread, now: float = 0.0) -> dict[str, str]:
    return {name: source.addresses[0] if source else "launcher" for name, source in spread.placed(now)}


def test_the_first_hosts_get_the_code_from_the_launcher_and_the_others_from_those():
    spread = Spread(is_on=True)
    for number in range(12):
        spread.wants(f"h{number}", BIG, 0.0)
    assert placed(spread) == {"h0": "launcher", "h1": "launcher"}
    assert spread.has_copy("h0")
    assert placed(spread) == {}, "the place is free when it is known whether it becomes a source"
    spread.gives("h0", SOURCE)
    assert placed(spread) == dict.fromkeys(("h2", "h3", "h4", "h5"), "a") | {"h6": "launcher"}
    assert spread.has_copy("h2")
    assert placed(spread) == {"h7": "a"}, "each source has four takers"
    spread.gives("h2", replace(SOURCE, addresses=("b",)))
    assert placed(spread) == dict.fromkeys(("h8", "h9", "h10", "h11"), "b")
    assert not spread.has_copy("h8"), "nobody waits"


def test_a_host_that_wants_more_keeps_its_place_until_it_has_all_or_another_gives_it_the_rest():
    spread = Spread(is_on=True)
    for number in range(6):
        spread.wants(f"h{number}", 1000, 0.0)
    assert len(placed(spread)) == 6, "what is little takes no place"
    for number in range(6):
        spread.wants(f"h{number}", BIG, 0.0)
    assert placed(spread) == {"h0": "launcher", "h1": "launcher"}
    for _ in range(3):
        spread.wants("h0", BIG, 0.0)
        assert placed(spread) == {"h0": "launcher"}
    assert spread.has_copy("h0")
    spread.gives("h0", SOURCE)
    spread.wants("h1", BIG, 0.0)
    assert set(placed(spread)) == {"h2", "h3", "h4", "h5", "h1"}


def test_slow_hosts_hold_up_no_others():
    spread = Spread(is_on=True)
    for number in range(6):
        spread.wants(f"h{number}", BIG, 100.0)
    assert [len(placed(spread, now)) for now in (100.0, 104.0, 105.5, 111.0, 130.0)] == [2, 0, 1, 1, 2]


def test_who_wants_little_waits_for_nobody():
    spread = Spread(is_on=True)
    for number in range(6):
        spread.wants(f"h{number}", 1000, 0.0)
    assert set(placed(spread).values()) == {"launcher"}
    assert not spread.waiting


def test_takers_of_a_source_that_fails_get_the_code_from_the_launcher():
    spread = Spread(is_on=True)
    for number in range(8):
        spread.wants(f"h{number}", BIG, 0.0)
    assert len(placed(spread)) == 2
    spread.has_copy("h0")
    spread.gives("h0", SOURCE)
    assert placed(spread) == dict.fromkeys(("h2", "h3", "h4", "h5"), "a") | {"h6": "launcher"}
    spread.leaves("h0")
    spread.wants("h2", BIG, 1.0)
    assert placed(spread, 1.0) == {"h2": "launcher"}
    spread.wants("h7", BIG, 1.0)
    assert placed(spread, 1.0) == {}


def test_hosts_that_never_reach_each_other_all_get_the_code_from_the_launcher():
    spread = Spread(is_on=True)
    for number in range(40):
        spread.wants(f"h{number}", BIG, 0.0)
    assert len(placed(spread)) == 2
    for name in ("h0", "h1"):
        spread.has_copy(name)
        spread.gives(name, SOURCE)
    for name in [name for name, source in placed(spread).items() if source == "a"]:
        spread.wants(name, BIG, 3.0)
    assert set(placed(spread, 3.0).values()) == {"launcher"}
    assert not spread.waiting


def test_of_few_hosts_each_gets_the_code_at_once():
    spread = Spread(is_on=False)
    for number in range(6):
        spread.wants(f"h{number}", BIG, 0.0)
    assert set(placed(spread).values()) == {"launcher"}
    assert not spread.has_copy("h0")


# What goes from one host to another.


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Sender, Source]:
    """Code that one host has, which gives it; ``receive`` then acts for another host that has nothing."""
    files = {f"lib/{number}.py": f"NUMBER = {number}" for number in range(100)}
    root = repository(tmp_path / "project", {"train.py": "print(1)\n", "empty": "", **files})
    (root / "big.bin").write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr(receive, "_problems", [])
    monkeypatch.setattr(receive, "_lock", [])
    monkeypatch.setattr(receive._Progress, "tell", lambda *_: None)
    monkeypatch.setattr(receive, "HOME_BASE", str(tmp_path / "first host"))
    sender = Sender(root)
    assert sender.run() == CopyAnswer()
    identity, certificate = new_identity()
    answers: list[Giving] = []
    order = GiveFiles(project=sender.order.project, name=sender.order.name, identity=identity.decode(), secret="secret")
    receive.serve(order, None, SimpleNamespace(send=answers.append))  # type: ignore[arg-type]
    monkeypatch.setattr(receive, "HOME_BASE", str(tmp_path / "second host"))
    sender.sent.clear()
    return sender, Source(("127.0.0.1",), answers[0].port, certificate, "secret")


def test_a_host_takes_all_that_it_lacks_from_another_one(given: tuple[Sender, Source]):
    sender, source = given
    sender.order = replace(sender.order, source=source)
    assert sender.run() == CopyAnswer()
    assert sender.sent == []
    assert (sender.copy / "big.bin").read_bytes() == (Path(sender.folder) / "big.bin").read_bytes()
    assert (sender.copy / "empty").read_bytes() == b""


@contextlib.contextmanager
def hostile(serve: Callable[[socket.socket], object], identity: bytes) -> Iterator[int]:
    """Listens, and serves the first connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(OSError):
            accepted, _ = listener.accept()
            with tls.server_context(identity).wrap_socket(accepted, server_side=True) as connection:
                serve(connection)

    thread = threading.Thread(target=run)
    thread.start()
    yield listener.getsockname()[1]
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("how", ["other bytes", "silent", "closed", "another certificate", "another secret", "absent"])
def test_a_source_that_is_wrong_is_left_and_the_launcher_asked(
    given: tuple[Sender, Source], how: str, monkeypatch: pytest.MonkeyPatch
):
    sender, source = given
    monkeypatch.setattr(peers, "_SILENT_S", 0.3)
    identity, certificate = new_identity()
    is_over = threading.Event()
    serve: dict[str, Callable[[socket.socket], object]] = {
        "other bytes": lambda connection: (connection.recv(9), connection.sendall(b"x" * (4 << 20))),
        "silent": lambda _: is_over.wait(10),
        "closed": lambda connection: connection.recv(9),
    }
    with hostile(serve.get(how, lambda _: None), identity) as port:
        wrong = {
            "another certificate": replace(source, certificate=certificate),
            "another secret": replace(source, secret="other"),
            "absent": replace(source, port=1),
        }
        if how in wrong:
            sender.order = replace(sender.order, source=wrong[how])
        else:
            sender.order = replace(sender.order, source=Source(("127.0.0.1",), port, certificate, "secret"))
        answer = sender.ask()
        is_over.set()
    assert [wanted.hash for wanted in answer.wanted] == [sender.order.marker]
    sender.order = replace(sender.order, source=None)
    assert sender.run() == CopyAnswer()
    for name in ("big.bin", "train.py"):
        assert content.hash_of((sender.copy / name).read_bytes()) == content.hash_of(
            (Path(sender.folder) / name).read_bytes()
        )


def test_a_source_that_is_damaged_gives_what_is_sound_and_the_rest_comes_from_the_launcher(
    given: tuple[Sender, Source], tmp_path: Path
):
    sender, source = given
    damaged = tmp_path / "first host/snapshots" / sender.order.project / sender.order.name / "lib/50.py"
    damaged.write_text("NUMBER = 99")
    sender.order = replace(sender.order, source=source)
    answer = sender.ask()
    assert content.hash_of(b"NUMBER = 50") in [wanted.hash for wanted in answer.wanted]
    sender.order = replace(sender.order, source=None)
    assert sender.run() == CopyAnswer()
    assert (sender.copy / "lib/50.py").read_text() == "NUMBER = 50"


@pytest.mark.parametrize(
    "line", [b"other\n", b"secret\n../../etc/passwd 0\n", b"secret\n\n", b"x" * 300, b"secret\nx -1\n"]
)
def test_who_does_not_know_the_secret_or_asks_for_something_else_gets_nothing(
    given: tuple[Sender, Source], line: bytes
):
    _, source = given
    plain = socket.create_connection(("127.0.0.1", source.port), 10)
    with tls.client_context(source.certificate).wrap_socket(plain) as connection:
        connection.sendall(line)
        assert connection.recv(100) == b""
