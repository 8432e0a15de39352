"""The launcher's control socket: whom it answers, and that no client disturbs the run."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.features.control import launcher as control_socket
from ddplaunch.features.control.launcher import Control, ControlSocket
from ddplaunch.features.hangs.records import ExamineRun, RunExamined
from ddplaunch.launcher.watches import Reply
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import (
    MAX_REQUEST_BYTES,
    SOCKET,
    Request,
    RequestRefused,
)
from ddplaunch.system import linux
from tests.support.processes import wait_until
from tests.support.watches import run_services

REQUEST = ExamineRun("job7.3f09ac")
ANSWER = RunExamined(sentences=("nothing moves",), lines=("rank 0: still",), path="/runs/stacks.txt")


class Served:
    """A control socket and the requests that it has posted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.posted = folder, queue.SimpleQueue[tuple[Request, Reply]]()
        self.socket = ControlSocket(folder, lambda *asked: self.posted.put(asked))

    @contextlib.contextmanager
    def client(self, line: bytes = wire.encode(REQUEST)) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(10)
            fd = os.open(self.folder, os.O_RDONLY)
            client.connect(f"/proc/self/fd/{fd}/{SOCKET}")
            os.close(fd)
            if line:
                client.sendall(line)
            yield client

    def answer_one(self) -> Request:
        request, reply = self.posted.get(timeout=10)
        reply(ANSWER)
        return request


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    yield found
    found.socket.close()


def read(client: socket.socket) -> object:
    """The answer; None if the connection was closed."""
    with client.makefile("rb") as stream, contextlib.suppress(ConnectionError):
        line = stream.readline()
        return wire.decode(line, (RequestRefused, RunExamined)) if line else None
    return None


def is_served(served: Served) -> bool:
    with served.client() as client:
        return served.answer_one() == REQUEST and read(client) == ANSWER


def test_only_this_user_may_connect_and_nothing_is_left(tmp_path: Path) -> None:
    served = Served(tmp_path)
    assert stat.S_IMODE(os.lstat(tmp_path / SOCKET).st_mode) == 0o600
    served.socket.close()
    assert not (tmp_path / SOCKET).exists()


def test_another_users_process_gets_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "peer_credentials", lambda _connection: (1, os.geteuid() + 1))
    with served.client(b"") as client:
        assert read(client) is None
    assert served.posted.empty()


def test_the_folder_may_have_a_long_path_and_be_renamed(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    served = Served(folder)
    served.folder = folder.rename(tmp_path / "moved")
    assert is_served(served)
    served.socket.close()
    assert list(served.folder.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"\xff\x00" * 100 + b"\n",
        b'{"record":"EndRun","run_id":"x","grace_s":0}\n',
        b'{"record":"ExamineRun","run_tag":"two\\nlines"}\n',
        b"x" * (2 * MAX_REQUEST_BYTES),
    ],
)
def test_what_is_no_request_is_refused(served: Served, line: bytes) -> None:
    with served.client(line) as client:
        assert read(client) in (RequestRefused("not a request that this version knows"), None)
    assert served.posted.empty()
    assert is_served(served)


def test_a_client_that_sends_no_request_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "_TRANSFER_S", 0.05)
    with served.client(b'{"rec') as client:
        assert read(client) is None


def test_a_client_that_never_reads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "_TRANSFER_S", 0.05)
    monkeypatch.setattr(control_socket, "_MAX_CLIENTS", 1)
    served = Served(tmp_path)
    with served.client():
        _, reply = served.posted.get(timeout=10)
        reply(RunExamined(sentences=("x" * 1000,) * 1000))
        wait_until(lambda: served.socket._places.acquire(blocking=False))
        served.socket._places.release()
        monkeypatch.undo()
        assert is_served(served)
    served.socket.close()


def test_a_client_that_dies_disturbs_nobody(served: Served) -> None:
    with served.client():
        pass
    served.answer_one()
    assert is_served(served)


def test_too_many_clients_are_refused_until_one_has_gone(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(served.client()) for _ in range(8)]
        requests = [served.posted.get(timeout=10) for _ in clients]
        with served.client(b"") as refused:
            assert read(refused) == RequestRefused("too many requests at once")
        for _, reply in requests:
            reply(ANSWER)
        assert [read(client) for client in clients] == [ANSWER] * 8


def test_a_launcher_that_does_not_answer_is_reported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "ANSWER_S", 0.05)
    with served.client() as client:
        assert read(client) == RequestRefused("the launcher has not answered for 0.05 s")


def test_at_the_end_of_the_run_waiting_clients_are_told(tmp_path: Path) -> None:
    served = Served(tmp_path)
    with served.client() as client:
        served.posted.get(timeout=10)
        served.socket.close()
        assert read(client) == RequestRefused("the run ends")


def test_a_folder_that_takes_no_socket_is_said_with_verbose_only(tmp_path: Path) -> None:
    (tmp_path / SOCKET).write_text("taken")
    shown: list[tuple[str, int]] = []
    show = lambda text, level: shown.append((text, level))  # noqa: E731
    config = LaunchConfig(script="x.py")
    Control(run_services(config, folder=tmp_path, show=show, post=lambda event: event())).on_loop_ended()  # type: ignore[operator]
    [(text, level)] = shown
    assert "--stacks will not work with this run" in text
    assert level == 1


def test_a_file_of_this_name_that_another_has_made_stays(tmp_path: Path) -> None:
    (tmp_path / SOCKET).write_text("another's")
    with pytest.raises(OSError, match="in use"):
        ControlSocket(tmp_path, lambda *_: None)
    assert (tmp_path / SOCKET).read_text() == "another's"
