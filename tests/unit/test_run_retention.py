"""Without --keep-runs, run folders are kept for 30 days and up to 5 GB; failed runs are kept the longest."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ddplaunch.config import OutputConfig
from ddplaunch.features.keep_runs import agent, retention
from ddplaunch.system.files import run_folder
from tests.support import runs
from tests.support.configs import agent_spec

if TYPE_CHECKING:
    from pathlib import Path

DAY_S = 86400.0


def run(base: Path, name: str, *, days: float = 1.0, outcome: str = "succeeded", duration_s: float = 3600) -> None:
    """A run that has ended ``days`` ago, with files of 100 kB."""
    folder = base / name
    (folder / "attempt_0" / "0").mkdir(parents=True)
    (folder / "attempt_0" / "0" / "stdout.log").write_bytes(bytes(100_000))
    (folder / run_folder.LOCK).touch()
    if outcome:
        (folder / "report.json").write_text(json.dumps({"outcome": outcome, "duration_s": duration_s}))
    for path in (folder / run_folder.LOCK, folder / "report.json"):
        if path.exists():
            os.utime(path, (time.time() - days * DAY_S,) * 2)


def kept(base: Path) -> set[str]:
    retention.prune(base, None)
    return {path.name for path in base.iterdir() if path.is_dir()}


def test_dozens_of_young_runs_are_kept_and_old_ones_are_not(tmp_path: Path) -> None:
    names = {f"run{number}" for number in range(40)}
    for name in names:
        run(tmp_path, name)
    run(tmp_path, "old", days=31)
    run(tmp_path, "old-failure", days=31, outcome="failed")
    assert kept(tmp_path) == names


def test_above_the_limit_short_successes_go_first_and_failures_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "failed", days=9, outcome="failed", duration_s=5)
    run(tmp_path, "killed", days=8, outcome="")
    run(tmp_path, "long", days=7)
    run(tmp_path, "short", days=1, duration_s=59)
    for limit, gone in ((410_000, set()), (310_000, {"short"}), (210_000, {"short", "long"}), (110_000, {"failed"})):
        monkeypatch.setattr(retention, "KEEP_BYTES", limit)
        (tmp_path / retention._STAMP).unlink(missing_ok=True)
        assert not kept(tmp_path) & gone
    assert kept(tmp_path) == {"killed"}


def test_a_run_of_several_launchers_is_as_useful_as_its_most_useful_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, outcomes in (("mixed", ("succeeded", "failed")), ("short", ("succeeded", "succeeded"))):
        for host, outcome in zip(("gpu1", "gpu2"), outcomes, strict=True):
            run(tmp_path / name, host, days=40 if host == "gpu1" else 2, outcome=outcome, duration_s=5)
        (tmp_path / name / run_folder.NODES).write_text(name)
    run(tmp_path, "long", days=3)
    monkeypatch.setattr(retention, "KEEP_BYTES", 310_000)
    assert kept(tmp_path) == {"mixed", "long"}


def test_sizes_are_read_once_an_hour(tmp_path: Path) -> None:
    assert kept(tmp_path) == set()
    run(tmp_path, "old", days=31)
    assert kept(tmp_path) == {"old"}
    os.utime(tmp_path / retention._STAMP, (time.time() - 3601,) * 2)
    assert kept(tmp_path) == set()


def test_a_number_of_runs_replaces_the_limits(tmp_path: Path) -> None:
    for days in (40, 2, 1):
        run(tmp_path, f"run{days}", days=days)
    retention.prune(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"run1", "run2"}
    retention.prune(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_the_time_stamp_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    run(tmp_path, "old", days=31)
    monkeypatch.setattr("pathlib.Path.touch", fail)
    assert kept(tmp_path) == set()


def test_a_node_deletes_in_the_default_folder_only(tmp_path: Path) -> None:
    for name in ("old", "new"):
        run(tmp_path, name, days=1 if name == "new" else 2)
    output = OutputConfig(keep_runs=1)
    node_dir = tmp_path / "new" / "gpu1"
    for spec in (
        agent_spec(output=replace(output, log_dir=str(tmp_path)), run_dir_name="new", node_dir=str(node_dir)),
        agent_spec(output=output, run_dir_name="", node_dir=str(node_dir)),
        agent_spec(output=output, run_dir_name="new", node_dir=None),
    ):
        agent.begin(spec, print)
    assert (tmp_path / "old").exists()
    agent.begin(agent_spec(output=output, run_dir_name="new", node_dir=str(node_dir)), print)
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


def test_a_run_deletes_old_folders_at_its_start(tmp_path: Path) -> None:
    base = tmp_path / "ddplaunch"
    for number in range(3):
        run(base, f"run{number}", days=9 - number)
    assert runs.run("--no-python", "--keep-runs", "2", "true", env={"XDG_STATE_HOME": str(tmp_path)}).returncode == 0
    assert len(list(base.iterdir())) == 2
    assert (base / "run2").exists()
