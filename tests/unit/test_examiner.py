"""The agent's questions to its workers: who may connect, what an answer may be, and who does not answer."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ddplaunch.features.hangs import worker_records
from ddplaunch.features.hangs.examiner import Examiner
from ddplaunch.system.unix_socket import LocalServer

OWN = os.getpid()
sockets: dict[Examiner, LocalServer] = {}


def packed(record: bytes, **facts: object) -> bytes:
    return json.dumps({worker_records.NBYTES: len(record), **facts}).encode() + b"\n" + record


@contextmanager
def connected(examiner: Examiner) -> Iterator[socket.socket]:
    """A connection from this process, which the examiner has accepted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
        worker.settimeout(10)
        accepted = threading.Event()
        examiner.on_accepted = accepted.set
        worker.connect(f"\0{sockets[examiner].open()}")
        assert accepted.wait(10)
        yield worker


@pytest.fixture
def examiner() -> Iterator[Examiner]:
    found = Examiner()
    sockets[found] = LocalServer("workers", found.take)
    yield found
    sockets.pop(found).close()
    found.close()


def answering(worker: socket.socket, *answers: bytes) -> threading.Thread:
    def serve() -> None:
        for answer in answers:
            assert worker.recv(1)
            worker.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_large_answer_arrives_whole_and_who_is_not_connected_gives_none(examiner: Examiner) -> None:
    record = os.urandom(5 << 20)
    with connected(examiner) as worker:
        thread = answering(worker, packed(record, cpu_s=0.5))
        answers = examiner.ask([OWN, 1], worker_records.RECORD)
        thread.join(10)
    assert answers.keys() == {OWN}
    assert (answers[OWN].cpu_s, answers[OWN].record) == (0.5, record)


def test_a_worker_that_ends_before_it_is_asked_or_answers_is_forgotten(examiner: Examiner) -> None:
    for is_asked in (False, True):
        with connected(examiner) as worker:
            worker.shutdown(socket.SHUT_WR if is_asked else socket.SHUT_RDWR)
            assert examiner.ask([OWN], worker_records.STATUS) == {}
            assert not examiner.is_connected(OWN)


def test_a_late_answer_to_another_question_is_not_taken_for_the_answer(examiner: Examiner) -> None:
    with connected(examiner) as worker:
        assert examiner.ask([OWN], worker_records.STATUS, timeout_s=0.01) == {}
        assert worker.recv(1) == worker_records.STATUS
        assert examiner.ask([OWN], worker_records.STATUS, timeout_s=0.01) == {}  # Not asked a second time.
        worker.sendall(packed(b"late"))
        thread = answering(worker, packed(b"record"))
        assert examiner.ask([OWN], worker_records.RECORD)[OWN].record == b"record"
        thread.join(10)


def test_a_worker_that_owes_an_answer_delays_no_later_question(examiner: Examiner) -> None:
    with connected(examiner):
        assert examiner.ask([OWN], worker_records.STATUS, timeout_s=0.01) == {}
        began = time.monotonic()
        assert examiner.ask([OWN], worker_records.STATUS, timeout_s=60) == {}
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("answer", [packed(b"", nbytes=worker_records.MAX_PART_BYTES + 1), b"{}\n", b"[1\n"])
def test_an_answer_that_is_too_long_or_none_ends_the_connection(examiner: Examiner, answer: bytes) -> None:
    with connected(examiner) as worker:
        thread = answering(worker, answer)
        assert examiner.ask([OWN], worker_records.STATUS) == {}
        thread.join(10)
    assert not examiner.is_connected(OWN)


def test_a_passing_lack_of_descriptors_does_not_end_it(examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")]

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr("ddplaunch.system.unix_socket._PAUSE_S", 0.0)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with connected(examiner), connected(examiner):  # The thread was in the real accept for the first.
        assert not errors
