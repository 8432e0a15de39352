"""--stop-before-end: before the job ends, the workers of all nodes get a signal and the time to save."""

from __future__ import annotations

import json
import re
import secrets
import signal
import time
from pathlib import Path

import pytest

from tests.process.test_cluster_starts import task
from tests.support.detached import JOB
from tests.support.processes import wait_until
from tests.support.runs import run, start

SAVE = """
import os, signal, sys, time
told = []
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, lambda number, _frame: told.append(signal.Signals(number).name))
print("runs", os.environ["RANK"], flush=True)
while not told:
    time.sleep(0.01)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.sleep(0.01)
print("saved after", *told, flush=True)
"""


@pytest.fixture
def save(script: Path) -> Path:
    script.write_text(SAVE)
    return script


def test_the_workers_have_the_time_that_is_left_whatever_the_grace_period_is(save: Path, tmp_path: Path):
    limit = ("--stop-before-end", "USR1@6", "--time-limit", "9", "--shutdown-timeout", "0.2")
    running = start(*limit, "--metrics-file", tmp_path / "m.prom", "--nproc-per-node", "2", save, "1")
    running.wait_for("runs", 2)
    shown = running.wait_for("the time limit is . s away: stopping the workers by SIGUSR1, SIGKILL in 4.5 s")
    done = running.finish()
    assert shown
    assert done.returncode == 90, done.err
    assert len(re.findall("saved after SIGUSR1$", done.out, re.MULTILINE)) == 2
    assert (done.report["outcome"], done.report["signal"], done.report["exit_code"]) == ("stopped", "SIGUSR1", 90)
    events = [json.loads(line) for line in (done.run_dir / "events.jsonl").read_text().splitlines()]
    (limit_event,) = (event for event in events if event["event"] == "time_limit")
    assert limit_event["end_t"] == pytest.approx(events[0]["t"] + 9, abs=3)
    assert f'run_limit_time_seconds{{run_id="{done.report["run_id"]}"}}' in (tmp_path / "m.prom").read_text()


def test_a_worker_that_does_not_end_is_killed_before_the_job_ends(save: Path):
    began = time.monotonic()
    done = start("--stop-before-end", "3", "--time-limit", "5", "--nproc-per-node", "1", save, "60").finish()
    assert done.returncode == 90, done.err
    assert time.monotonic() - began < 15
    assert "saved" not in done.out


def test_ps_and_the_page_show_the_time_that_is_left(save: Path):
    options = ("--rdzv-id", JOB, "--nproc-per-node", "1")
    running = start("--stop-before-end", "5m", "--time-limit", "2h", *options, save, "0")
    running.wait_for("runs")
    shown = run("--ps", JOB).out
    assert re.search(r"running for .*; 1h59m left\n", shown), shown
    page = Path(run("--page", JOB).out.strip()).read_text()
    assert "<dt>time left</dt><dd>1 h 59 min</dd>" in page
    assert "the time limit is 2 h away" in page or "the time limit is 1 h 59 min away" in page
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 143


@pytest.mark.parametrize("ahead_s", [-2, 2])
def test_launchers_of_nodes_whose_clocks_differ_stop_together(save: Path, ahead_s: int):
    """As if the clock of the second node were ahead of that of the first, which serves the rendezvous, or behind it."""
    job_id, ends = str(secrets.randbelow(10**9)), int(time.time()) + 20
    options = ("--stop-before-end", "USR1@12", "--nproc-per-node", "1", "--shutdown-timeout", "0.2")
    nodes = [
        task(job_id, save, rank, *options, env={"SLURM_JOB_END_TIME": str(end)}, arguments=("1",))
        for rank, end in enumerate((ends, ends - ahead_s))
    ]
    finished = [each.finish() for each in nodes]
    assert [done.returncode for done in finished] == [90, 90], [done.err for done in finished]
    assert all("saved after SIGUSR1\n" in done.out for done in finished)
    assert all(done.report["signal"] == "SIGUSR1" for done in finished)


def test_a_signal_of_the_scheduler_beside_it_is_the_same_stop(save: Path, tmp_path: Path):
    """SLURM's own warning, which would shorten the grace period if it counted as a second request."""
    (scontrol := tmp_path / "scontrol").write_text("#!/bin/sh\necho JobId=7 BatchFlag=1 Requeue=1 JobState=RUNNING\n")
    scontrol.chmod(0o755)
    ends = int(time.time()) + 15
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(ends), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    options = ("--stop-before-end", "10", "--requeue-on", "USR1", "--nproc-per-node", "1")
    running = start(*options, save, "1", env=job)
    running.wait_for("stopping the workers by SIGTERM, SIGKILL in 7.5 s.*; the job is requeued afterwards")
    wait_until(lambda: running.lines != [])
    running.signal(signal.SIGUSR1)
    done = running.finish()
    assert (done.returncode, done.report["will_requeue"]) == (90, True), done.err
    assert done.err.count("stopping the workers") == 1
    assert "requeuing SLURM job 7" in done.err
