"""What other machines send as logs is written where it belongs, and nothing that they can send does any harm."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from ddplaunch.launcher import collected, log_writer
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.collected import Collected
from ddplaunch.launcher.handles import LogData
from ddplaunch.launcher.nodes import Nodes
from ddplaunch.launcher.remote import NodeFacts
from ddplaunch.logs import WINDOW_BYTES, LogChunk, LogsFound, LogsSent, LogsWanted
from tests.support.processes import wait_until

OUT = "attempt_0/0/stdout.log"


class Handle:
    """An agent that only hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.is_killed = False

    def send(self, record: object) -> None:
        self.heard.append(record)

    def kill(self) -> None:
        self.is_killed = True


class Starter:
    is_remote = True

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts

    def start(self, index: int) -> Handle:
        return Handle()

    def spec(self, index: int) -> None: ...


class Progress:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def show(self, text) -> float:
        self.texts.append(text())
        return float("inf")

    def end(self) -> None:
        self.texts.append("")


class Run:
    """A run of some nodes whose work is done."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        self.folder = folder
        self.said: list[tuple[str, int]] = []
        self.progress = Progress()
        self.nodes = Nodes(Starter(*hosts), 1, len(hosts), None, Attempts(), self.say)
        self.nodes.start()
        for node in self.nodes.all:
            self.nodes.connected(node, NodeFacts())
            node.handle.heard.clear()
            node.left = ()
        self.collected = Collected(folder, self.nodes, self)

    def say(self, text: str, level: int) -> None:
        self.said.append((text, level))

    def find(self, *nodes: int) -> None:
        for number in nodes or range(len(self.nodes.all)):
            self.collected.hear(self.nodes.all[number], LogsFound(1, 1000))

    def send(self, number: int, path: str, data: bytes, *, is_last: bool = True) -> None:
        chunk = LogChunk(path, len(data), is_last)
        self.collected.hear(self.nodes.all[number], LogData(chunk, data))

    def sent(self, *nodes: int, left_out: int = 0) -> None:
        for number in nodes:
            self.collected.hear(self.nodes.all[number], LogsSent(left_out))

    def heard(self, number: int) -> list[object]:
        return self.nodes.all[number].handle.heard

    def leave(self, *nodes: int, state="ended") -> None:
        for number in nodes:
            self.nodes.all[number].state = state
        self.collected.act()

    def end(self) -> list[str]:
        self.leave(*(node.index for node in self.nodes.all if node.state == "running"))
        self.collected.close()
        return [text for text, _ in self.said]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, "gpu1", "gpu2")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pieces_become_files_by_node_and_all_is_counted(run: Run) -> None:
    run.find()
    run.send(0, OUT, b"one ", is_last=False)
    run.send(1, "attempt_0/filtered_stdout.log", b"")
    run.send(0, OUT, b"two")
    run.send(1, "attempt_1/3/error.json", b"{}")
    wait_until(lambda: len(run.heard(0)) == len(run.heard(1)) == 3)
    assert run.heard(0) == [LogsWanted(WINDOW_BYTES), LogsWanted(4 + 512), LogsWanted(3 + 512)]
    run.sent(0, 1)
    assert run.end() == [f"logs of 2 ranks (9 B) from 2 nodes are in {run.folder}"]
    assert files(run.folder) == {
        "gpu1/attempt_0/0/stdout.log": b"one two",
        "gpu2/attempt_0/filtered_stdout.log": b"",
        "gpu2/attempt_1/3/error.json": b"{}",
    }
    assert os.stat(run.folder / "gpu1" / OUT).st_mode & 0o777 == 0o600
    assert run.progress.texts[-1] == ""


def test_a_file_that_is_not_whole_is_marked_and_said(run: Run) -> None:
    run.find()
    run.send(0, OUT, b"all")
    run.send(1, OUT, b"hal", is_last=False)
    run.sent(0)
    assert run.end() == [
        f"logs of 1 rank (3 B) from 1 node are in {run.folder}",
        "logs of gpu2 are not all here: its connection has ended; the rest is still there",
    ]
    assert files(run.folder) == {f"gpu1/{OUT}": b"all", f"gpu2/{OUT}.part": b"hal"}


@pytest.mark.parametrize("path", ["../x", "/tmp/x", "attempt_0/0/../../../x", "attempt_0/0/" + "x" * 300, "", "a\0"])
def test_a_name_that_leads_elsewhere_ends_it_for_that_node_alone(run: Run, path: str) -> None:
    run.find()
    run.send(0, path, b"evil")
    run.send(0, OUT, b"later")
    run.send(1, OUT, b"good")
    run.sent(1)
    assert run.end()[1] == "logs of gpu1 are not all here: what it sent was not asked for; the rest is still there"
    assert LogsWanted(0) in run.heard(0)
    assert files(run.folder) == {f"gpu2/{OUT}": b"good"}


def test_who_sends_more_than_is_wanted_is_not_heard_any_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.find(0)
    for _ in range(3):
        run.send(0, OUT, b"x" * (WINDOW_BYTES // 2 - 512), is_last=False)
        monkeypatch.setattr(log_writer, "cost", lambda _: 0)  # Nothing is wanted again.
    assert "logs of gpu1 are not all here: what it sent was not asked for; the rest is still there" in run.end()


def test_there_is_a_limit_to_the_bytes_of_a_node(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "_MAX_NODE_BYTES", 300 << 10)
    run.find()
    for _ in range(3):
        before = len(run.heard(0))
        run.send(0, OUT, b"x" * (128 << 10), is_last=False)
        wait_until(lambda before=before: len(run.heard(0)) > before)
    run.send(1, OUT, b"good")
    run.sent(1)
    assert (
        "logs of gpu1 are not all here: no more than 300 kB of a node are brought; the rest is still there" in run.end()
    )


def test_there_is_a_limit_to_the_files_of_a_node(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "MAX_FILES", 3)
    run.find(0)
    for number in range(4):
        run.send(0, f"attempt_0/{number}/stdout.log", b"")
    assert "not asked for" in str(run.end())
    assert len(files(run.folder)) == 3


def test_what_was_not_asked_for_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpu1")
    run.nodes.all[0].left = None  # It still works.
    run.find()
    run.send(0, OUT, b"x")
    run.sent(0)
    assert not run.nodes.all[0].sends_logs
    assert run.heard(0) == []
    assert files(tmp_path) == {}


def test_files_that_are_here_already_stay_as_they_are(run: Run) -> None:
    """A file system that both machines have: the agent's file and the one to write are one."""
    there = run.folder / "gpu1" / OUT
    there.parent.mkdir(parents=True)
    there.write_bytes(b"theirs")
    run.find()
    run.send(0, OUT, b"thei", is_last=False)
    run.send(0, OUT, b"rs")
    wait_until(lambda: LogsWanted(0) in run.heard(0))
    run.send(1, OUT, b"good")
    run.sent(1)
    assert run.end() == [
        f"logs of gpu1 are in {run.folder}, which is on a file system of theirs",
        f"logs of 1 rank (4 B) from 1 node are in {run.folder}",
    ]
    assert files(run.folder) == {f"gpu1/{OUT}": b"theirs", f"gpu2/{OUT}": b"good"}


def test_a_disk_that_is_full_is_told_once_and_keeps_room_for_the_report(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "_KEPT_FREE_BYTES", 1 << 62)
    run.find()
    run.send(0, OUT, b"x" * 1000, is_last=False)
    run.send(1, OUT, b"y")
    wait_until(lambda: run.collected.act() and LogsWanted(0) in run.heard(0) and LogsWanted(0) in run.heard(1))
    assert run.end() == [
        f"logs of gpu[1-2] are not all here: {run.folder}: {os.strerror(errno.ENOSPC)}; the rest is still there"
    ]
    assert run.said[0][1] == -1
    assert files(run.folder) == {}


def test_a_folder_that_cannot_be_made_is_told_as_well(run: Run) -> None:
    (run.folder / "gpu1").write_text("a file")
    run.find()
    run.send(0, OUT, b"x")
    wait_until(lambda: run.collected.act() and LogsWanted(0) in run.heard(1))
    assert run.end() == [
        f"logs of gpu[1-2] are not all here: {run.folder}: {os.strerror(errno.ENOTDIR)}; the rest is still there"
    ]


def test_few_nodes_send_at_a_time(tmp_path: Path) -> None:
    run = Run(tmp_path, *(f"gpu{n}" for n in range(40)))
    run.find()
    asked = lambda: [n for n in range(40) if run.heard(n)]  # noqa: E731
    assert len(asked()) == 16
    run.sent(0, 1)
    run.leave(2)
    assert len(asked()) == 19
    assert "logs of gpu[2-39] are not all here: its connection has ended; the rest is still there" in run.end()


def test_lost_nodes_are_named_and_those_whose_agents_never_came_to_it(tmp_path: Path) -> None:
    run = Run(tmp_path, *(f"gpu{n}" for n in range(1, 5)))
    run.leave(0, 1, state="lost")
    run.find(3)
    run.sent(3)
    assert run.end() == [
        "logs of gpu3 are not all here: its connection has ended; the rest is still there",
        "logs of gpu[1-2] could not be brought: lost",
    ]


def test_files_that_an_agent_left_out_are_counted(run: Run) -> None:
    run.find()
    run.sent(0)
    run.sent(1, left_out=3)
    assert run.end() == ["3 files of gpu2 stayed there: not readable, too many, or not named as logs are"]


def test_a_signal_ends_it_and_a_second_one_at_once(run: Run) -> None:
    run.find(0)
    assert not run.collected.interrupted(signal.SIGINT), "the other node still works"
    run.find(1)
    assert run.collected.interrupted(signal.SIGINT)
    assert run.heard(0)[-1] == run.heard(1)[-1] == LogsWanted(0)
    assert not run.nodes.all[0].handle.is_killed
    assert run.collected.interrupted(signal.SIGINT)
    assert run.nodes.all[0].handle.is_killed
    assert run.end()[-1] == "logs of gpu[1-2] are not all here: SIGINT; the rest is still there"
    assert not run.collected.interrupted(signal.SIGINT)


def test_who_sends_nothing_is_given_up_and_who_does_not_leave_is_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collected, "_STALL_S", 0.0)
    run.find()
    wait_until(lambda: run.collected.act() and LogsWanted(0) in run.heard(0))
    assert not run.nodes.all[0].handle.is_killed
    monkeypatch.setattr(collected, "_LEAVE_S", 0.0)
    run.sent(1)
    run.collected._done(run.collected._senders[0])
    wait_until(lambda: run.collected.act() and run.nodes.all[0].handle.is_killed)
    assert "logs of gpu[1-2] are not all here: nothing has come for 0 s; the rest is still there" in run.end()


def test_without_a_folder_nothing_is_done_and_nothing_said(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpu1")
    run.collected = Collected(None, run.nodes, run)
    run.find()
    assert run.heard(0) == []
    assert run.collected.act() == float("inf")
    assert run.end() == []
