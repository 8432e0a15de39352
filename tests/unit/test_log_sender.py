"""An agent sends all its log files and nothing else, as fast as it is asked, and answers its launcher meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.agent.launcher_channel import LauncherLost, Outbox
from ddplaunch.features.collect_logs import after_end
from ddplaunch.features.collect_logs.after_end import LogSender, find_logs
from ddplaunch.features.collect_logs.records import (
    CHUNK_BYTES,
    FROM_AGENT,
    WINDOW_BYTES,
    GrantLogBytes,
    LogChunk,
    LogsFound,
    LogsSent,
    cost,
    is_safe,
)
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Notice, Ping, Pong
from ddplaunch.system.signals import SignalReceived
from tests.support import golden, texts

# Names.


def test_only_what_agents_write_is_safe() -> None:
    golden.check_answers("log_names", is_safe)


@given(st.text(st.sampled_from("attempt_0/.x\n\\ -"), max_size=30) | st.text(texts.ENCODABLE, max_size=30))
def test_a_safe_name_stays_below_its_folder(path: str) -> None:
    if is_safe(path):
        assert os.path.normpath(f"/run/{path}") == f"/run/{path}"


# Sending.


class Launcher:
    """Takes what a LogSender sends, in a thread; ``answers`` says to each record what to post."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._stream = os.fdopen(reader, "rb")
        self.mailbox: Mailbox[object] = Mailbox()
        self.outbox = Outbox(writer)
        self.sender = LogSender(self.outbox, self.mailbox)
        self.records: list[object] = []
        self.files: dict[str, bytes] = {}

    def serve(self) -> None:
        """Want a window at first, then what has come."""
        came = wanted = 0
        while (received := wire.read_record(self._stream, (*FROM_AGENT, Pong, Notice))) is not None:
            record, data = received
            self.records.append(record)
            match record:
                case LogsFound():
                    wanted += WINDOW_BYTES
                    self.mailbox.post(GrantLogBytes(WINDOW_BYTES))
                case LogChunk(path=path):
                    came += cost(record)
                    assert came <= wanted
                    self.files[path] = self.files.get(path, b"") + data
                    wanted += cost(record)
                    self.mailbox.post(GrantLogBytes(cost(record)))
                case Notice(text="the end"):
                    return

    def take_all(self, folder: Path) -> dict[str, bytes]:
        """Have all sent. Returns what came, by path."""
        thread = threading.Thread(target=self.serve)
        thread.start()
        self.sender.send(folder)
        self.outbox.send(Notice("the end"))
        thread.join(60)
        return self.files

    def leave(self) -> None:
        self._stream.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.leave()


def write(folder: Path, path: str, data: bytes) -> bytes:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(data)
    return data


def test_every_file_of_every_attempt_comes_as_it_is(launcher: Launcher, tmp_path: Path) -> None:
    sizes = (0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3_000_000)
    there = {
        path: write(tmp_path, path, os.urandom(size))
        for attempt, size in enumerate(sizes)
        for path in (f"attempt_{attempt}/0/stdout.log", f"attempt_{attempt}/filtered_stderr.log")
    }
    assert launcher.take_all(tmp_path) == there
    assert launcher.records[0] == LogsFound(sum(map(len, there.values())))
    assert launcher.records[-2] == LogsSent(0)
    assert sum(isinstance(record, LogChunk) and record.is_last for record in launcher.records) == len(there)


def test_links_pipes_and_odd_names_are_left_out_and_counted(launcher: Launcher, tmp_path: Path) -> None:
    there = write(tmp_path, "attempt_0/0/stdout.log", b"mine\n")
    secret = tmp_path / "attempt_0" / "0" / "secret"
    secret.symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "attempt_0" / "0" / "pipe")
    write(tmp_path, "attempt_0/0/deep/er", b"not ours")
    write(tmp_path, "attempt_0/0/with space", b"not ours")
    assert launcher.take_all(tmp_path) == {"attempt_0/0/stdout.log": there}
    assert launcher.records[-2] == LogsSent(4)


def test_there_may_be_too_many_and_none(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddplaunch.features.collect_logs.after_end.MAX_FILES", 2)
    for number in range(5):
        write(tmp_path, f"attempt_0/{number}/stdout.log", b"")
    assert [len(find_logs(tmp_path)[0]), find_logs(tmp_path)[1]] == [2, 3]
    assert find_logs(tmp_path / "missing") == ({}, 0)
    assert launcher.take_all(tmp_path / "missing") == {}


def test_pings_are_answered_while_nothing_is_wanted(launcher: Launcher, tmp_path: Path) -> None:
    write(tmp_path, "attempt_0/0/stdout.log", b"x" * 1_000_000)
    for event in (Ping(5.0), GrantLogBytes(70_000), Ping(5.0), GrantLogBytes(0)):
        launcher.mailbox.post(event)
    launcher.sender.send(tmp_path)
    assert launcher.mailbox.get(0.0) is None
    launcher.outbox.send(Notice("the end"))
    launcher.serve()
    assert launcher.records.count(Pong()) == 2
    assert sum(map(len, launcher.files.values())) <= 70_000


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_the_workers_stops_nothing(launcher: Launcher, tmp_path: Path, signum: int) -> None:
    there = write(tmp_path, "attempt_0/0/stdout.log", b"all of it\n")
    launcher.mailbox.post(SignalReceived(signum))
    assert launcher.take_all(tmp_path) == {"attempt_0/0/stdout.log": there}


@pytest.mark.parametrize("event", [LauncherLost(), SignalReceived(15)])
def test_nobody_is_waited_for_who_is_gone(launcher: Launcher, tmp_path: Path, event: object) -> None:
    launcher.mailbox.post(event)
    launcher.sender.send(tmp_path)


def test_without_a_launcher_or_a_folder_nothing_is_sent(launcher: Launcher, tmp_path: Path) -> None:
    lost, gone = threading.Event(), threading.Event()
    gone.set()
    after_end.act(SimpleNamespace(node_dir=None), "", launcher.outbox, launcher.mailbox, lost)
    after_end.act(SimpleNamespace(node_dir=str(tmp_path)), "", launcher.outbox, launcher.mailbox, gone)
    launcher.outbox.send(Notice("the end"))
    launcher.serve()
    assert launcher.records == [Notice("the end")]
