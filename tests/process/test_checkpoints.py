"""--checkpoint: the next attempt gets the newest whole one, and attempts that save nothing do not go on for ever."""

from __future__ import annotations

import json
import re
import secrets
import sys
from pathlib import Path

import pytest

from tests.process.test_cluster_starts import task
from tests.support.runs import Finished, run, start

TRAIN = """
import os, pathlib, sys, time, zipfile
folder, last = pathlib.Path(sys.argv[1]), int(sys.argv[2])
found = os.environ["DDPLAUNCH_CHECKPOINT"]
step = int(found.rpartition("-")[2].partition(".")[0]) if found else 0
print("from", step, *sys.argv[3:], flush=True)
if found and pathlib.Path(found).read_bytes().endswith(b"damaged"):
    raise RuntimeError("the checkpoint of step %d cannot be loaded" % step)
if step == last:
    sys.exit(0)
(folder.parent / ("began-%d-" % step + os.environ["RANK"])).touch()
if os.environ["RANK"] == "0":
    while len(list(folder.parent.glob("began-%d-*" % step))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    with zipfile.ZipFile(folder / "part", "w") as archive:
        archive.writestr("weights", "%d" % step)
    os.rename(folder / "part", folder / ("step-%d.pt" % (step + 1)))
else:
    while not (folder / ("step-%d.pt" % (step + 1))).exists():
        time.sleep(0.01)
raise ValueError("after each step")
"""
"""Each attempt saves one step more, and fails, until the last. Rank 0 alone saves."""


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    (folder := tmp_path / "saves").mkdir()
    return folder


def train(script: Path, saves: Path, last: int, *options: str) -> Finished:
    script.write_text(TRAIN)
    options = ("--checkpoint", str(saves), "--nproc-per-node", "2", *options)
    return start(*options, script, saves, str(last), "--resume={checkpoint}").finish()


def test_each_attempt_begins_from_the_newest_checkpoint_on_all_ranks(script: Path, saves: Path, tmp_path: Path):
    done = train(script, saves, 4, "--max-restarts", "9", "--metrics-file", str(tmp_path / "m.prom"))
    assert done.returncode == 0, done.err
    lines = sorted(re.findall(r":\d\] from (\d) --resume=(\S*)", done.out))
    paths = ["", *(f"{saves}/step-{step}.pt" for step in range(1, 5))]
    assert lines == sorted((str(step), path) for step, path in enumerate(paths) for _ in range(2))
    assert done.report["checkpoint"] == paths[-1]
    assert 0 < done.report["lost_work_s"] < 60
    events = [json.loads(line) for line in (done.run_dir / "events.jsonl").read_text().splitlines()]
    assert [event.get("step") for event in events if event["event"] == "checkpoint"] == [1, 2, 3, 4]
    assert len([event for event in events if event["event"] == "work_lost"]) == 4
    metrics = (tmp_path / "m.prom").read_text()
    assert re.search(r"run_checkpoint_step\{.*\} 4\n", metrics)
    assert re.search(r"run_goodput_ratio\{.*\} 0", metrics)
    page = Path(run("--page", done.run_dir.name).out.strip()).read_text()
    assert "<dt>checkpoint</dt><dd>step 4 (step-4.pt)" in page
    assert "without work that no checkpoint has" in page


@pytest.mark.slow
def test_200_restarts_of_a_job_that_makes_progress_are_not_too_many(script: Path, saves: Path):
    """Each attempt ends by the same exception at the same place, soon after its start."""
    script.write_text(TRAIN)
    options = ("--checkpoint", saves, "--max-restarts", "200", "--nproc-per-node", "1")
    done = start(*options, script, saves, "200").finish(timeout_s=300)
    assert done.returncode == 0, done.err[-2000:]
    assert len(done.report["attempts"]) == 201


def test_three_attempts_that_fail_alike_and_save_nothing_end_the_run(script: Path, saves: Path):
    """By an exception that without --checkpoint counts as one that may pass."""
    script.write_text("raise OSError(28, 'No space left on device')")
    done = start("--checkpoint", saves, "--max-restarts", "50", "--nproc-per-node", "1", script).finish()
    assert done.returncode == 1
    assert "not restarted again: 3 attempts in a row ended by the same failure, and none of them has saved" in done.err
    assert "work lost: " in done.err
    assert len(done.report["attempts"]) == 3


DAMAGED = "step 3 (step-3.pt) may be damaged: two attempts in a row have failed soon after they began from it"


def damage(saves: Path) -> None:
    """The archive can be found whole, but cannot be loaded."""
    for step in (2, 3):
        (saves / f"step-{step}.pt").write_bytes(b"PK\x03\x04..PK\x05\x06" + (b"damaged" if step == 3 else b""))


def test_a_checkpoint_that_ends_attempts_is_named(script: Path, saves: Path):
    damage(saves)
    done = train(script, saves, 3, "--max-restarts", "9")
    assert done.returncode == 1
    assert f"{DAMAGED}, and saved nothing newer; --set-aside-bad-checkpoint renames it" in done.err, done.err
    assert done.err.count("may be damaged") == 1
    assert len(done.report["attempts"]) == 3
    assert sorted(path.name for path in saves.iterdir()) == ["step-2.pt", "step-3.pt"]


def test_a_checkpoint_that_ends_attempts_is_set_aside_and_the_job_goes_on_from_the_one_before(
    script: Path, saves: Path
):
    damage(saves)
    (saves / "last.pt").symlink_to("step-3.pt")
    done = train(script, saves, 3, "--max-restarts", "9", "--set-aside-bad-checkpoint")
    assert done.returncode == 0, done.err
    assert DAMAGED in done.err, done.err
    aside = f"{saves}/step-3.pt.bad1, and last.pt names step-2.pt now"
    assert f"step-3.pt is set aside as {aside}; it may be sound after all" in done.err
    assert set(re.findall(r":\d\] from (\d)", done.out)) == {"3", "2"}
    assert len(done.report["attempts"]) == 4


def test_not_all_checkpoints_are_set_aside_if_it_is_the_script_that_fails(script: Path, saves: Path):
    damage(saves)
    script.write_text("raise OSError('always')")
    options = ("--checkpoint", saves, "--max-restarts", "50", "--set-aside-bad-checkpoint", "--nproc-per-node", "1")
    done = start(*options, script).finish()
    assert done.returncode == 1
    assert len(done.report["attempts"]) == 3
    assert sorted(path.name for path in saves.iterdir()) == ["step-2.pt", "step-3.pt.bad1"]


def test_launchers_of_several_nodes_name_the_same_checkpoint(script: Path, saves: Path):
    """Only rank 0's node looks where there are checkpoints; the other one is told."""
    script.write_text(TRAIN)
    job_id = str(secrets.randbelow(10**9))
    options = ("--max-restarts", "9", "--nproc-per-node", "1", "--checkpoint")
    nodes = [
        task(job_id, script, rank, *options, str(where), arguments=(str(saves), "3"))
        for rank, where in enumerate((saves, saves.parent / "nothing"))
    ]
    finished = [each.finish() for each in nodes]
    assert [done.returncode for done in finished] == [0, 0], [done.err for done in finished]
    for rank, done in enumerate(finished):
        assert re.findall(rf":{rank}\] from (\d)", done.out) == ["0", "1", "2", "3"]


def test_nodes_of_one_launcher_name_the_same_checkpoint(script: Path, saves: Path):
    """Simulated ones, whose agents and members are those of any run."""
    script.write_text(TRAIN)
    options = ("--dry-run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "9", "--checkpoint", str(saves))
    done = start(*options, script, saves, "2").finish()
    assert done.returncode == 0, done.err
    assert sorted(re.findall(r":(\d)\] from (\d)", done.out)) == [(r, s) for r in "01" for s in "012"]
    assert done.report["checkpoint"] == f"{saves}/step-2.pt"


def test_a_program_gets_the_checkpoint_as_an_argument(saves: Path):
    damage(saves)
    code = "import os, sys; print(sys.argv[1:], os.environ['DDPLAUNCH_CHECKPOINT'])"
    program = ("--no-python", sys.executable, "-c", code, "{checkpoint}", "x={checkpoint}")
    done = start("--checkpoint", f"{saves}/*.pt", "--nproc-per-node", "1", *program).finish()
    path = f"{saves}/step-3.pt"
    assert f"['{path}', 'x={path}'] {path}\n" in done.out, done.err
