"""--ps --all lists every run folder, whatever is in it, the newest first, in a table that fits the terminal."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.features.come_back import past_runs
from ddplaunch.features.come_back.past_runs import PastRun
from ddplaunch.launcher import run_facts
from ddplaunch.launcher.display import console_log, report_files
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.system.files import run_folder
from ddplaunch.text import iso_time
from tests.support import golden
from tests.support.asked import asked
from tests.support.processes import own_descriptors

NOW_S = 1_795_345_165.0
NO_PID = 1 << 30


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    base = tmp_path / "ddplaunch"
    base.mkdir()
    return base


def made(base: Path, name: str, started: dict[str, Any] | None = None, report: object = None) -> Path:
    folder = base / name
    folder.mkdir(parents=True)
    (folder / run_folder.LOCK).touch()
    os.utime(folder / run_folder.LOCK, (NOW_S - 999, NOW_S - 999))
    for file, body in ((run_folder.RUN, started), (run_folder.REPORT, report)):
        if body is not None:
            (folder / file).write_text(body if isinstance(body, str) else json.dumps(body))
    return folder


def record(run_id: str, age_s: float = 60.0, **fields: Any) -> dict[str, Any]:
    command = ["ddplaunch", "train.py", f"--name={run_id}", "a b"]
    start = {"run_id": run_id, "start": iso_time(NOW_S - age_s), "host": socket.gethostname(), "pid": NO_PID}
    return {**start, "run_tag": f"{run_id}.0a1b2c", "command": command, "script": "train.py", **fields}


def listed(log_dir: Path | None = None) -> list[PastRun]:
    folders = past_runs.all_folders(str(log_dir) if log_dir else None)
    return [past_runs.of_launchers(found) for found in folders]


def table(log_dir: Path | None = None, columns: int | None = None) -> list[str]:
    shown: list[str] = []
    with mock.patch.object(past_runs, "_columns", return_value=columns):
        past_runs.list_all(asked("", shown.append, log_dir=str(log_dir) if log_dir else None))
    return "\n".join(shown).splitlines()


def test_each_run_has_a_line_the_newest_first(base: Path, tmp_path: Path) -> None:
    ended = {"exit_code": 0, "outcome": "succeeded", "duration_s": 93.0}
    failed = {"exit_code": 84, "outcome": "failed", "duration_s": 40.0, "reason": "node2 is lost"}
    ages = iter(range(60, 6000, 60))

    def run(name: str, report: dict[str, Any] | None = None, **fields: Any) -> Path:
        started = record(name.partition("/")[0], next(ages), **fields)
        return made(base, name, started, None if report is None else {**started, **report})

    run("succeeded", ended)
    run("killed")
    run("of-another-machine", host="another")
    error = WorkerError("KeyError: 'lr\x1b'\nmore", "", 0.0)
    first = WorkerExit(3, 1, "gpu2", 9, 1, False, 0.0, 1.0, error)
    whole = RunResult("failed", 1, "failed", 3800.0, (AttemptResult(0, "failed", (first,), 5.0),), first)
    report_files.write_report(replace(whole, command=("ddplaunch", "x.py")), run("failed"))
    for name, reports in {"a-node-failed": (ended, failed), "a-launcher-killed": (ended, None)}.items():
        for number, report in enumerate(reports, 1):
            run(f"{name}/node{number}", report)
        (base / name / run_folder.NODES).touch()
    for key, number in (("duration_s", 10**400), ("duration_s", math.nan), ("exit_code", 10**400)):
        run(f"impossible-{key}-{number}"[:26], {**ended, key: number})
    (run("a-folder") / run_folder.REPORT).mkdir()
    os.mkfifo(made(base, "a-fifo") / run_folder.RUN)
    made(base, "of-an-older-version", None, {"run_id": "of-an-older-version", **ended})
    made(tmp_path / "logs", "elsewhere", record("elsewhere", 90), {**record("elsewhere", 90), **ended})
    (base / "notes").mkdir()
    (base / "link").symlink_to(base / "succeeded")
    descriptors = own_descriptors()
    lines = table(tmp_path / "logs")
    assert own_descriptors() <= descriptors
    assert [line for line in lines if not line.startswith("elsewhere")] == table()
    golden.check("past_runs", {"all runs": "\n".join(lines)})


def test_a_run_goes_on_while_its_launcher_holds_the_lock(base: Path) -> None:
    folder = run_folder.create(base, "job7")
    run_facts.write(run_facts.of_this_process("job7", "job7.0a1b2c", LaunchConfig(script="train.py")), folder)
    (folder / console_log.FILE).touch()
    os.utime(folder / console_log.FILE, (NOW_S + 9, NOW_S + 9))
    assert (listed()[0].result, listed()[0].duration_s) == ("running", pytest.approx(0, abs=0.01))
    with run_folder.released(folder):
        pass
    assert (listed()[0].result, listed()[0].duration_s) == ("killed", pytest.approx(9, abs=0.01))


def test_the_first_cause_is_the_best_that_the_report_has(base: Path) -> None:
    """A question is a part of a report."""
    whole = {"run_id": "job7", "exit_code": 1, "outcome": "failed", "duration_s": 1.0}

    def cause(part: str) -> str:
        folder = made(base, "job7", record("job7"), {**whole, **json.loads(part)})
        (run,) = listed()
        shutil.rmtree(folder)
        return run.cause

    golden.check_answers("first_causes", cause)


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", "null", "\xff", "[" * 100_000),
        '{"run_id": 3, "start": [], "exit_code": "0", "duration_s": "x"}',
        '{"start": "9999-99-99", "duration_s": NaN, "exit_code": true}',
        '{"start": "0001-01-01T00:00:00+14:00"}',
    ],
)
def test_damaged_and_cut_files_never_stop_the_listing(damage: str, base: Path) -> None:
    good = record("good", 10)
    made(base, "good", good, {**good, "exit_code": 7, "outcome": "failed", "duration_s": 1})
    (made(base, "bad-run") / run_folder.RUN).write_text(damage, encoding="latin-1")
    (made(base, "bad-report", record("bad-report", 20)) / run_folder.REPORT).write_text(damage, encoding="latin-1")
    lines = {line.split()[0]: line for line in table()}
    assert lines.keys() == {"run", "good", "bad-run", "bad-report"}
    assert "exit 7" in lines["good"]
    assert "damaged" in lines["bad-report"]
    assert "ddplaunch train.py" in lines["bad-report"]


def test_no_run_is_told_with_the_folders(base: Path, tmp_path: Path) -> None:
    assert table(tmp_path / "none") == [f"no run folder of yours in {base} or {tmp_path / 'none'}"]


@pytest.mark.parametrize(("columns", "lines", "cuts"), [(60, 3, 2), (80, 3, 2), (100, 2, 2), (220, 2, 1)])
def test_the_table_fits_the_terminal(columns: int, lines: int, cuts: int) -> None:
    runs = [PastRun("job7", NOW_S, 93.0, "exit 1", "ddplaunch " + "x" * 300, "rank 0: " + "y" * 80)]
    text = past_runs.run_table(runs, columns)
    assert max(map(len, text.splitlines())) <= columns
    assert (text.count("\n") + 1, text.count("...")) == (lines, cuts)
    assert "exit 1" in text
    plain = past_runs.run_table(runs, None)
    assert "x" * 300 in plain
    assert "y" * 80 in plain


def test_control_characters_of_a_command_are_escaped() -> None:
    run = PastRun("job7\x1b", 1e300, None, "killed", "ddplaunch \x1b[2J\n", "")
    assert past_runs.run_table([run], 200).splitlines()[1].split("  ")[0] == r"job7\x1b"
    assert r"\x1b[2J\n" in past_runs.run_table([run], None)
