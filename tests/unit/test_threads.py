"""Whoever waits for a thread gets an answer, whatever happens in it; and an error in it is shown."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ddplaunch.agent.launcher_channel import Outbox
from ddplaunch.agent.workers.output import Stream
from ddplaunch.agent.workers.pump import Pump
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.system.linux import output_pipe
from ddplaunch.system.unix_socket import Connection, LocalServer
from ddplaunch.threads import in_thread, post_from_thread, result_of, start_work


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that threads have not caught."""
    errors: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(str(args.exc_value)))
    return errors


def fail() -> str:
    raise ValueError("a bug")


def join_others(before: set[threading.Thread]) -> None:
    """Wait for the end of all threads except those of ``before``."""
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def posted(work: Callable[[], str]) -> str | None:
    mailbox: Mailbox[str] = Mailbox()
    post_from_thread("a call", work, mailbox.post, "otherwise")
    return mailbox.get(time.monotonic() + 60)


def test_a_thread_posts_what_its_call_returns() -> None:
    assert posted(lambda: threading.current_thread().name) == "a call"


def test_a_thread_that_fails_posts_the_other_answer_and_shows_the_error(shown: list[str]) -> None:
    before = set(threading.enumerate())
    assert posted(fail) == "otherwise"
    join_others(before)
    assert shown == ["a bug"]


@pytest.mark.usefixtures("no_threads")
def test_without_room_for_a_thread_the_other_answer_comes_at_once() -> None:
    assert posted(lambda: "answer") == "otherwise"
    assert start_work("a call", lambda: "answer", "otherwise")(time.monotonic() + 60) == "otherwise"
    with pytest.raises(RuntimeError):
        in_thread("a loop", fail)


def test_a_result_is_waited_for_until_the_deadline() -> None:
    is_free = threading.Event()
    result = start_work("slow", lambda: is_free.wait(60), otherwise=False)
    assert not result(time.monotonic() + 0.01)
    is_free.set()
    assert result(time.monotonic() + 60)


@pytest.mark.usefixtures("shown")
def test_a_result_is_the_other_one_if_the_call_fails() -> None:
    assert start_work("a call", fail, "otherwise")(time.monotonic() + 60) == "otherwise"


def never() -> bool:
    return False


def test_a_result_is_waited_for_while_something_else_is_looked_after() -> None:
    looked = threading.Event()

    def look() -> bool:
        looked.set()
        return False

    assert result_of("a call", lambda: looked.wait(60), look, None) is True
    assert result_of("a call", lambda: threading.current_thread().name, never, "") == "a call"


def test_a_call_in_a_thread_raises_here_what_it_raises_there(shown: list[str]) -> None:
    with pytest.raises(ValueError, match="a bug"):
        result_of("a call", fail, never, "")
    assert shown == []


def test_a_call_that_takes_too_long_is_given_up_and_goes_on() -> None:
    may_end, ends = threading.Event(), list[bool]()
    before = set(threading.enumerate())
    assert result_of("a call", lambda: ends.append(may_end.wait(60)), lambda: True, "given up") == "given up"
    may_end.set()
    join_others(before)
    assert ends == [True]


@pytest.mark.usefixtures("no_threads")
def test_without_room_for_a_thread_this_one_makes_the_call() -> None:
    assert result_of("a call", lambda: threading.current_thread().name, never, "") == "MainThread"


def test_a_bug_with_one_connection_of_a_worker_does_not_refuse_the_next(capfd: pytest.CaptureFixture[str]) -> None:
    taken: Mailbox[Connection] = Mailbox()

    def take(connection: Connection) -> bool:
        if connection.address:
            raise ValueError("a bug in a feature")
        taken.post(connection)
        return True

    workers = LocalServer("workers", take)
    name = workers.open()
    with socket.socket(socket.AF_UNIX) as bad, socket.socket(socket.AF_UNIX) as good:
        bad.bind("")  # An abstract address, which the kernel chooses.
        bad.connect(f"\0{name}")
        assert bad.recv(1) == b""
        good.connect(f"\0{name}")
        connection = taken.get(time.monotonic() + 60)
        assert connection
        connection.socket.close()
    workers.close()
    assert "a bug in a feature" in capfd.readouterr().err


def test_a_bug_in_the_thread_that_reads_a_worker_does_not_block_the_worker(shown: list[str]) -> None:
    def send(_header: Output, _data: bytes) -> bool:
        raise ValueError("a bug")

    readers, writers = zip(output_pipe(), output_pipe(), strict=True)
    streams = [Stream(Output("node", 0, 0, name, 0), send, None) for name in ("stdout", "stderr")]
    pump = Pump(dict(zip(readers, streams, strict=True)), "output[0]")
    os.write(writers[0], b"line\nunfinished")
    assert pump.join(time.monotonic() + 60, time.monotonic())
    for writer in writers:
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"line\n")
        os.close(writer)
    assert shown == ["a bug"]


def test_a_bug_in_the_thread_that_writes_to_the_launcher_ends_the_channel(shown: list[str]) -> None:
    before = set(threading.enumerate())
    reader, writer = os.pipe()
    outbox = Outbox(writer)
    header: Any = object()
    outbox.send_file(header, b"")  # No header: it cannot be encoded.
    assert os.read(reader, 1) == b"", "the launcher sees the end of its agent"
    os.close(reader)
    join_others(before)
    assert not outbox.send_output(Output("node", 0, 0, "stdout", 0), b"line\n"), "nobody waits for it"
    assert len(shown) == 1
