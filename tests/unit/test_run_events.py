"""events.jsonl: what is written when, that it never blocks or fails, and that a full disk costs lines only."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.cluster.hosts import parse_hosts
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import Level
from ddplaunch.features import declarations
from ddplaunch.features.run_events import launcher
from ddplaunch.features.run_events.launcher import EventFile, RunEvents
from ddplaunch.features.runs.run_json import EVENTS
from ddplaunch.protocol.launcher_agent import AgentEnded, AgentReady, AttemptEnded, AttemptStarted, Output
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from tests.support import golden
from tests.support.watches import run_services

HOSTS = ("gpu1", "gpu2")


class Log:
    """The events of a run of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / EVENTS
        nodes = SimpleNamespace(all=[SimpleNamespace(host=host) for host in HOSTS])
        self.events = RunEvents(run_services(LaunchConfig(script="x.py"), folder=folder, nodes=nodes))

    def on(self, index: int, event: object) -> None:
        self.events.on_event(index, event)

    def end(self, outcome: Any = "succeeded", exit_code: int = 0) -> list[dict[str, Any]]:
        self.events.add_to_result(RunResult("job7", exit_code, outcome, 9.0))
        lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        assert {line["event"] for line in lines} <= declarations("EVENTS").keys()
        assert {key for line in lines for key in line} <= declarations("EVENT_KEYS").keys()
        return lines


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def failed(rank: int, duration_s: float = 5.0) -> WorkerExit:
    return WorkerExit(rank, rank, "gpu1", 11, 1, False, 1e9, duration_s)


def without_t(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "t"} for line in lines]


def test_the_story_of_a_run(log: Log):
    log.on(0, AgentReady(1))
    log.on(0, AttemptStarted(0, 1, (11,), 0, 1, 0, 1.25))
    log.events.on_note("message", "a text", None, None, {"level": Level.VERBOSE})
    log.on(0, AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(failed(0),), duration_s=5.0)))
    log.on(1, AgentReady(4))
    log.on(0, AgentEnded())
    lines = [json.dumps(line) for line in without_t(log.end("failed", 1))]
    golden.check("run_events", {"the story of a run": "\n".join(lines)})


def test_it_is_the_users_alone(log: Log):
    assert stat.S_IMODE(log.file.stat().st_mode) == 0o600


def test_a_failure_is_when_the_worker_ended_not_when_it_was_reported(log: Log, monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("ddplaunch.features.run_events.launcher.time.time", lambda: now)
    log.on(0, AttemptStarted(0, 1, (11,), 0, 1, 0))
    now = 1060.0
    log.on(0, AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(failed(0, 5.0),), duration_s=60.0)))
    assert [line["t"] for line in log.end() if line["event"] == "worker_failed"] == [1005.0]


def test_of_thousands_of_failures_some_are_written(log: Log):
    exits = tuple(map(failed, range(1000)))
    log.on(0, AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=exits, duration_s=60.0)))
    assert sum(line["event"] == "worker_failed" for line in log.end()) == 20


def test_the_first_output_of_each_node_in_each_attempt(log: Log):
    shown: list[bytes] = []
    write = log.events.on_output(lambda _, data: shown.append(data))
    for attempt, host in ((0, "gpu1"), (0, "gpu1"), (0, "gpu2"), (1, "gpu1")):
        write(Output(host, 3, 3, "stdout", 1, attempt=attempt), b"x")
    first = [(line["attempt"], line["host"]) for line in log.end() if line["event"] == "first_output"]
    assert first == [(0, "gpu1"), (0, "gpu2"), (1, "gpu1")]
    assert shown == [b"x"] * 4


def test_where_the_files_are_is_said_also_of_an_attempt_that_fails_before_all_workers_run(tmp_path: Path):
    node = SimpleNamespace(host="gpu1", details=SimpleNamespace(folder="/there"))
    config = LaunchConfig(script="x.py", hosts=parse_hosts("gpu1"))
    events = RunEvents(run_services(config, folder=tmp_path, nodes=SimpleNamespace(all=[node])))
    events.on_event(0, AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(failed(3),), duration_s=5.0)))
    events.add_to_result(RunResult("job7", 1, "failed", 9.0))
    (started,) = (line for line in written(tmp_path) if line["event"] == "attempt_started")
    assert (started["first_rank"], started["folder"]) == (3, "/there")


# The file.


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


def test_without_a_folder_there_is_nothing_to_write(tmp_path: Path):
    for file in (EventFile(None), EventFile(tmp_path / "missing")):
        file.add({"event": "message"})
        file.close()


def test_a_full_disk_costs_lines_which_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    file = EventFile(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(launcher.kept_files, "keep_free", full)
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

        patch.setattr(os, "write", half)
        file._write({"t": 1, "event": "message"})
    file._write({"t": 2, "event": "message"})
    file.close()
    cut, dropped, last = (tmp_path / EVENTS).read_text().splitlines()
    assert cut
    assert json.loads(dropped)["count"] == 1
    assert json.loads(last)["t"] == 2


def test_the_file_is_bounded_and_still_has_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "MAX_BYTES", 1000)
    file = EventFile(tmp_path)
    for _ in range(100):
        file.add({"t": 1, "event": "message", "text": "x" * 50})
    file.add({"t": 2, "event": "run_ended"})
    file.close()
    assert [line["event"] for line in written(tmp_path)][-3:] == ["message", "limit", "run_ended"]
    assert (tmp_path / EVENTS).stat().st_size < 1100


def test_a_slow_disk_costs_events_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "_MAX_QUEUED", 0)
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
