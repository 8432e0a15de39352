"""The page of a run of which each node has a launcher: what it makes of their files, and who makes it."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.page import reading
from ddplaunch.features.page.make import whole_run
from ddplaunch.features.page.render import badge
from ddplaunch.features.page.story import story
from ddplaunch.protocol import wire
from ddplaunch.protocol.results import AttemptResult, Outcome, WorkerError, WorkerExit
from ddplaunch.protocol.run_result import RunResult

NOW = 1100.0


def write(folder: Path, rank: int, events: list[dict[str, Any]], report: dict[str, Any] | None, host: str = "") -> Path:
    """The folder of the launcher of a node with one worker."""
    folder.mkdir(parents=True)
    (folder.parent / ".ddplaunch-nodes").touch()
    (folder / ".ddplaunch-run").touch()
    host = host or folder.name
    (folder / "run.json").write_text(json.dumps({"run_id": "job7", "host": host, "command": ["ddplaunch"]}))
    start = {"event": "attempt_started", "attempt": 0, "workers": 1, "first_rank": rank, "world_size": 3}
    common = [{"t": 1000 + rank, "event": "run_started", "text": "job7"}, {"t": 1005, "host": host, **start}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*common, *events]))
    if report:
        (folder / "report.json").write_text(json.dumps(report))
    return folder


def ended(rank: int, host: str, code: int) -> WorkerExit:
    error = WorkerError("KeyError", "", 1095.0) if code == 1 else None
    return WorkerExit(rank, 0, host, 7, code, code == -15, 1095.0, 90.0, error)


def report(rank: int, host: str, code: int = 0, first: WorkerExit | None = None) -> dict[str, Any]:
    outcome: Outcome = "failed" if first else "succeeded"
    attempt = AttemptResult(0, outcome, (ended(rank, host, code),), 90.0)
    result = RunResult("job7", 1 if first else 0, outcome, 100.0, (attempt,), first)
    body: dict[str, Any] = wire.to_json(result)
    return body


def test_three_folders_are_one_run(tmp_path: Path):
    """Events that all launchers have are there once; what one says is its; the worst outcome is the run's."""
    run = tmp_path / "job7"
    restart = {"t": 1050, "event": "restart", "text": "again"}
    quiet, active = {"t": 1010, "event": "quiet"}, {"t": 1040, "event": "active"}
    first = ended(1, "gpu1", 1)
    write(run / "gpu0", 0, [quiet, active, restart], report(0, "gpu0", -15, first))
    write(run / "gpu1", 1, [{**quiet, "t": 1020}, restart], report(1, "gpu1", 1, first))
    write(run / "gpu2", 2, [{**quiet, "t": 1030}, restart, {"t": 1060, "event": "signal"}], report(2, "gpu2"))
    files = reading.read(run)
    told = story(files, NOW)
    assert [*told.nodes] == ["gpu0", "gpu1", "gpu2"]
    assert [(span.start, span.end) for span in told.quiet] == [(1030, 1040)]
    texts = [(moment.kind, moment.where) for moment in told.moments]
    assert texts.count(("restart", "")) == texts.count(("run started", "")) == 1
    assert ("signal", "gpu2") in texts
    assert files.report
    assert (badge(files)["word"], files.report.first_failure) == ("failed", first)
    assert files.missing == []


def test_launchers_of_one_host_have_the_names_of_their_folders(tmp_path: Path):
    for rank in (0, 1, 2):
        write(tmp_path / f"gpu.{rank}", rank, [], report(rank, "gpu"), host="gpu")
    told = story(reading.read(tmp_path), NOW)
    assert {host: [bar.end for bar in bars] for host, bars in told.nodes.items()} == {
        f"gpu.{rank}": ["ok"] for rank in (0, 1, 2)
    }


def test_what_is_missing_is_named(tmp_path: Path):
    write(tmp_path / "gpu0", 0, [], report(0, "gpu0"))
    damaged = write(tmp_path / "gpu1", 1, [], None)
    (damaged / "run.json").write_text("{")
    missing = reading.read(tmp_path).missing
    assert missing == [
        "gpu1: run.json is damaged: command and start are not known.",
        "gpu1: report.json is missing: exit code and failures are not known.",
        "There is no folder with the events of rank 2.",
    ]
    assert "others have ranks 0, 2." in reading.read(damaged).notes[0]


@pytest.mark.parametrize("has_report", [False, True])
def test_one_launcher_makes_the_page_of_all(tmp_path: Path, has_report: bool):
    """The first at work, while the run goes on; at its end, the last."""
    first = write(tmp_path / "gpu0", 0, [], None)
    second = write(tmp_path / "gpu1", 1, [], report(1, "gpu1") if has_report else None)
    with (first / ".ddplaunch-run").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert whole_run(first) == tmp_path
        assert whole_run(second) is None
        files = reading.read(tmp_path)
        assert (badge(files)["word"], files.is_live) == ("running", True)
    assert whole_run(second) == (tmp_path if has_report else None)  # The first has been killed.
    assert whole_run(tmp_path) is None
