"""What other machines send as logs is written where it belongs, and nothing that they can send does any harm."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.features.collect_logs import launcher, log_writer
from ddplaunch.features.collect_logs.launcher import LogCollector
from ddplaunch.features.collect_logs.records import WINDOW_BYTES, GrantLogBytes, LogChunk, LogsFound, LogsSent
from ddplaunch.launcher.nodes import NodeState
from ddplaunch.transport.handle import WithData
from ddplaunch.transport.remote_start import NodeFacts
from tests.support.fake_agents import participants_of
from tests.support.processes import wait_until
from tests.support.watches import run_services

OUT = "attempt_0/0/stdout.log"

ON_NODES = "the complete files stay on the nodes"


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
        self.participants = participants_of((1, len(hosts)), *hosts, show=self.show)
        self.nodes = self.participants.nodes
        for node in self.nodes.all:
            self.nodes.on_agent_connected(node, NodeFacts())
            node.handle.sent.clear()
            node.state, node.unkillable_pids = NodeState.ENDING, ()
        self.collected = self.collector(folder)

    def collector(self, folder: Path | None, kind: str = "logs") -> LogCollector:
        parts = {"nodes": self.nodes, "participants": self.participants, "messages": self}
        return LogCollector(run_services(LaunchConfig(script="x.py"), folder=folder, **parts), kind)

    def show(self, text: str, level: int) -> None:
        self.said.append((text, level))

    def find(self, *nodes: int) -> None:
        for number in nodes or range(len(self.nodes.all)):
            self.collected.on_event(number, LogsFound(1000))

    def send(self, number: int, path: str, data: bytes, *, is_last: bool = True) -> None:
        chunk = LogChunk(path, len(data), is_last)
        self.collected.on_event(number, WithData(chunk, data))

    def sent(self, *nodes: int, skipped_files: int = 0) -> None:
        for number in nodes:
            self.collected.on_event(number, LogsSent(skipped_files))

    def sent_to(self, number: int) -> list[object]:
        return self.nodes.all[number].handle.sent

    def leave(self, *nodes: int, state=NodeState.DONE) -> None:
        for number in nodes:
            self.nodes.all[number].state = state
        self.run_due()

    def run_due(self) -> float:
        return self.collected.run_due(time.monotonic())

    def end(self) -> list[str]:
        self.leave(*(node.index for node in self.nodes.all if node.state.has_agent))
        self.collected.on_loop_ended()
        return [text for text, _ in self.said]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, "gpu1", "gpu2")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_why_values_of_a_node_have_not_arrived(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpu1", "gpu2", "gpu3", "gpu4")
    run.collected = run.collector(tmp_path, "return values")
    run.find()
    for number in range(4):
        run.send(number, "attempt_0/0/return.pkl", b"value")
    run.sent(0)
    run.sent(1, skipped_files=1)
    run.leave(2)
    run.leave(3, state=NodeState.LOST)
    run.end()
    assert run.collected.missing == {
        "gpu2": "1 file could not be read",
        "gpu3": "the connection was closed",
        "gpu4": "gpu4 was lost",
    }


def test_pieces_become_files_by_node_and_all_is_counted(run: Run) -> None:
    run.find()
    run.send(0, OUT, b"one ", is_last=False)
    run.send(1, "attempt_0/filtered_stdout.log", b"")
    run.send(0, OUT, b"two")
    run.send(1, "attempt_1/3/error.json", b"{}")
    wait_until(lambda: len(run.sent_to(0)) == len(run.sent_to(1)) == 3)
    assert run.sent_to(0) == [GrantLogBytes(WINDOW_BYTES), GrantLogBytes(4 + 512), GrantLogBytes(3 + 512)]
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
        f"logs of gpu2 are incomplete: the connection was closed; {ON_NODES}",
    ]
    assert files(run.folder) == {f"gpu1/{OUT}": b"all", f"gpu2/{OUT}.part": b"hal"}


@pytest.mark.parametrize("path", ["../x", "/tmp/x", "attempt_0/0/../../../x", "attempt_0/0/" + "x" * 300, "", "a\0"])
def test_a_name_that_leads_elsewhere_ends_it_for_that_node_alone(run: Run, path: str) -> None:
    run.find()
    run.send(0, path, b"evil")
    run.send(0, OUT, b"later")
    run.send(1, OUT, b"good")
    run.sent(1)
    assert run.end()[1] == f"logs of gpu1 are incomplete: the node sent data that was not requested; {ON_NODES}"
    assert GrantLogBytes(0) in run.sent_to(0)
    assert files(run.folder) == {f"gpu2/{OUT}": b"good"}


def test_who_sends_more_than_is_wanted_is_not_heard_any_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.find(0)
    for _ in range(3):
        run.send(0, OUT, b"x" * (WINDOW_BYTES // 2 - 512), is_last=False)
        monkeypatch.setattr(log_writer, "cost", lambda _: 0)  # Nothing is wanted again.
    assert f"logs of gpu1 are incomplete: the node sent data that was not requested; {ON_NODES}" in run.end()


def test_there_is_a_limit_to_the_bytes_of_a_node(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_MAX_NODE_BYTES", 300 << 10)
    run.find()
    for _ in range(3):
        before = len(run.sent_to(0))
        run.send(0, OUT, b"x" * (128 << 10), is_last=False)
        wait_until(lambda before=before: len(run.sent_to(0)) > before)
    run.send(1, OUT, b"good")
    run.sent(1)
    assert f"logs of gpu1 are incomplete: more than 300 kB are not copied from one node; {ON_NODES}" in run.end()


def test_there_is_a_limit_to_the_files_of_a_node(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_FILES", 3)
    run.find(0)
    for number in range(4):
        run.send(0, f"attempt_0/{number}/stdout.log", b"")
    assert "not requested" in str(run.end())
    assert len(files(run.folder)) == 3


def test_what_was_not_asked_for_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpu1")
    run.nodes.all[0].state = NodeState.RUNNING
    run.find()
    run.send(0, OUT, b"x")
    run.sent(0)
    assert run.nodes.all[0].state is NodeState.RUNNING
    assert run.sent_to(0) == []
    assert files(tmp_path) == {}


def test_a_folder_that_cannot_be_made_is_told_as_well(run: Run) -> None:
    (run.folder / "gpu1").write_text("a file")
    run.find()
    run.send(0, OUT, b"x")
    wait_until(lambda: run.run_due() and GrantLogBytes(0) in run.sent_to(1))
    assert run.end() == [f"logs of gpu[1-2] are incomplete: {run.folder}: {os.strerror(errno.ENOTDIR)}; {ON_NODES}"]


def test_few_nodes_send_at_a_time(tmp_path: Path) -> None:
    run = Run(tmp_path, *(f"gpu{n}" for n in range(40)))
    run.find()
    asked = lambda: [n for n in range(40) if run.sent_to(n)]  # noqa: E731
    assert len(asked()) == 16
    run.sent(0, 1)
    run.leave(2)
    wait_until(lambda: run.run_due() and len(asked()) == 19)
    assert f"logs of gpu[2-39] are incomplete: the connection was closed; {ON_NODES}" in run.end()


def test_files_that_an_agent_left_out_are_counted(run: Run) -> None:
    run.find()
    run.sent(0)
    run.sent(1, skipped_files=3)
    assert run.end() == ["3 files of gpu2 not copied: unreadable, too many, or not named like a log"]


def test_a_signal_ends_it_and_a_second_one_at_once(run: Run) -> None:
    run.find(0)
    assert not run.collected.on_stop(signal.SIGINT), "the other node still works"
    run.find(1)
    assert run.collected.on_stop(signal.SIGINT)
    assert run.sent_to(0)[-1] == run.sent_to(1)[-1] == GrantLogBytes(0)
    assert not run.nodes.all[0].handle.is_killed
    assert run.collected.on_stop(signal.SIGINT)
    assert run.nodes.all[0].handle.is_killed
    assert run.end()[-1] == f"logs of gpu[1-2] are incomplete: SIGINT; {ON_NODES}"
    assert not run.collected.on_stop(signal.SIGINT)


def test_who_sends_nothing_is_given_up_and_who_does_not_leave_is_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_STALL_S", 0.0)
    run.find()
    wait_until(lambda: run.run_due() and GrantLogBytes(0) in run.sent_to(0))
    assert not run.nodes.all[0].handle.is_killed
    monkeypatch.setattr(launcher, "_EXIT_S", 0.0)
    run.sent(1)
    run.collected._senders[0].finish()
    wait_until(lambda: run.run_due() and run.nodes.all[0].handle.is_killed)
    assert f"logs of gpu[1-2] are incomplete: nothing has arrived for 0 s; {ON_NODES}" in run.end()


def test_without_a_folder_nothing_is_done_and_nothing_said(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpu1")
    run.collected = run.collector(None)
    run.find()
    assert run.sent_to(0) == [GrantLogBytes(0)], "the node sends nothing, and ends"
    assert run.run_due() == float("inf")
    assert run.end() == []
