"""events.jsonl: what is written when, that it never blocks or fails, and that a full disk costs lines only."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from ddplaunch.errors import Level
from ddplaunch.features.debug.records import SessionClosed, SessionOpened
from ddplaunch.features.health.records import HealthFinding
from ddplaunch.launcher.display import event_file
from ddplaunch.launcher.display.event_file import EventFile
from ddplaunch.launcher.run_files.run_events import QUIET_S, RunEvents, _QuietTime
from ddplaunch.protocol.launcher_agent import (
    AgentEnded,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    Output,
    WorkerActivity,
)
from ddplaunch.protocol.results import AttemptResult, RunResult, WorkerExit
from ddplaunch.protocol.run_events import FIELDS, FILE, KINDS
from tests.support import golden

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = ("gpu1", "gpu2")


class Log:
    """The events of a run of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self.events = RunEvents(folder, "job7", HOSTS.__getitem__)

    def on(self, index: int, event: object) -> None:
        self.events.on_event(index, (0, 1), event)

    def end(self, outcome: Any = "succeeded", exit_code: int = 0) -> list[dict[str, Any]]:
        self.events.ended(RunResult("job7", exit_code, outcome, 9.0), None)
        lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        assert {line["event"] for line in lines} <= KINDS.keys()
        assert {key for line in lines for key in line} <= FIELDS.keys()
        return lines


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def failed(rank: int, duration_s: float = 5.0) -> WorkerExit:
    return WorkerExit(rank, rank, "gpu1", 11, 1, False, 1e9, duration_s)


def ended(*exits: WorkerExit) -> AttemptEnded:
    return AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=exits, duration_s=60.0))


SESSION = SessionOpened(7, 2, 3, "gpu2", "at breakpoint() (train.py:5)")
STORIES: dict[str, list[Any]] = {
    "a run": [
        *((0, AgentReady(1)), (0, AttemptStarted(0, 1, (11,), 0, 1, 0, 1.25)), ("a text", Level.VERBOSE)),
        (0, HealthFinding(rule="xid-79", text="fell off the bus", severity="warn", gpu=3)),
        *((0, ended(failed(0))), (1, AgentReady(4)), (0, AgentEnded())),
    ],
    "debug sessions": [(1, SESSION), (0, SessionClosed(7)), 2, (1, SessionClosed(7, has_quit=True))],
    "a failure is when the worker ended, not when it was reported": [
        *((0, AttemptStarted(0, 1, (11,), 0, 1, 0)), 60, (0, ended(failed(0, 5.0)))),
    ],
    "a job that hangs is quiet also within a shorter limit": [
        *((0, AttemptStarted(3, 1, (11,), 0, 1, 0)), ("no report of a node yet", 0, "hang_reported")),
        *((0, WorkerActivity(3, 20.0)), ("nothing has moved", 0, "hang_reported")),
        ("nothing has moved", 0, "hang_aborted"),
    ],
    "what is quiet at its end is not quiet any more": [
        *((0, WorkerActivity(0, QUIET_S + 5)), (1, WorkerActivity(0, QUIET_S + 5)), (0, ended())),
    ],
}
"""Events of nodes, messages, and seconds that pass."""


def written_of(story: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    now = 1000.0
    monkeypatch.setattr("ddplaunch.launcher.run_files.run_events.time.time", lambda: now)
    folder.mkdir()
    log = Log(folder)
    for step in story:
        if isinstance(step, int):
            now += step
        elif isinstance(step[0], int):
            log.on(*step)
        else:
            log.events.message(*step)
    return "\n".join(map(json.dumps, log.end("failed", 1)))


def test_what_is_written_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    golden.check("events", {name: written_of(story, tmp_path / name, monkeypatch) for name, story in STORIES.items()})


def test_it_is_the_users_alone(log: Log):
    assert stat.S_IMODE(log.file.stat().st_mode) == 0o600


def test_of_thousands_of_failures_some_are_written(log: Log):
    exits = tuple(map(failed, range(1000)))
    log.on(0, AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=exits, duration_s=60.0)))
    assert sum(line["event"] == "worker_failed" for line in log.end()) == 20


def test_the_first_output_of_each_node_in_each_attempt(log: Log):
    shown: list[bytes] = []
    write = log.events.noting_first(lambda _, data: shown.append(data))
    for attempt, host in ((0, "gpu1"), (0, "gpu1"), (0, "gpu2"), (1, "gpu1")):
        write(Output(host, 3, 3, "stdout", 1, attempt=attempt), b"x")
    first = [(line["attempt"], line["host"]) for line in log.end() if line["event"] == "first_output"]
    assert first == [(0, "gpu1"), (0, "gpu2"), (1, "gpu1")]
    assert shown == [b"x"] * 4


def test_a_job_is_quiet_when_all_its_nodes_are():
    quiet = _QuietTime()
    assert quiet.on_activity(0, (0, 1), WorkerActivity(0, QUIET_S + 5), 1000.0) is None
    assert quiet.on_activity(1, (0, 1), WorkerActivity(0, QUIET_S - 5), 1000.0) is None
    assert quiet.on_activity(1, (0, 1), WorkerActivity(0, QUIET_S + 5), 1010.0) == ("quiet", 945.0, 65.0)
    assert quiet.on_activity(1, (0, 1), WorkerActivity(0, QUIET_S + 9), 1014.0) is None
    assert quiet.on_activity(0, (0, 1), WorkerActivity(0, 0.0), 1020.0) == ("active", 1020.0, 75.0)
    assert quiet.on_activity(0, (0, 1), WorkerActivity(0, 0.0), 1021.0) is None


# The file.


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_without_a_folder_there_is_nothing_to_write(tmp_path: Path):
    for file in (EventFile(None), EventFile(tmp_path / "missing")):
        file.add({"event": "message"})
        file.close()


def test_a_full_disk_costs_lines_which_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    file = EventFile(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(event_file, "keep_free", full)
        file._write({"t": 1, "event": "message"})
        file._write({"t": 2, "event": "message"})
    file._write({"t": 3, "event": "message"})
    file.close()
    assert written(tmp_path) == [{"t": 3, "event": "dropped", "count": 2}, {"t": 3, "event": "message"}]


def test_after_a_line_that_was_cut_a_new_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, real = EventFile(tmp_path), os.write
    with monkeypatch.context() as patch:

        def half(fd: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, "full")
            return real(fd, data[:10])

        patch.setattr(event_file.os, "write", half)
        file._write({"t": 1, "event": "message"})
    file._write({"t": 2, "event": "message"})
    file.close()
    cut, dropped, last = (tmp_path / FILE).read_text().splitlines()
    assert cut
    assert json.loads(dropped)["count"] == 1
    assert json.loads(last)["t"] == 2


def test_the_file_is_bounded_and_still_has_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_file, "MAX_BYTES", 1000)
    file = EventFile(tmp_path)
    for _ in range(100):
        file.add({"t": 1, "event": "message", "text": "x" * 50})
    file.add({"t": 2, "event": "run_ended"})
    file.close()
    assert [line["event"] for line in written(tmp_path)][-3:] == ["message", "limit", "run_ended"]
    assert (tmp_path / FILE).stat().st_size < 1100


def test_a_slow_disk_costs_events_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_file, "_MAX_QUEUED", 0)
    file = EventFile(tmp_path)
    for _ in range(3):
        file.add({"t": 1, "event": "message"})
    file.close()
    assert [line["count"] for line in written(tmp_path)] == [3]


def test_long_texts_are_cut(tmp_path: Path):
    file = EventFile(tmp_path)
    file.add({"t": 1, "event": "message", "text": "x" * 10_000})
    file.close()
    assert len(written(tmp_path)[0]["text"]) == 2000
