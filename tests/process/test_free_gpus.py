"""``--gpus free`` on a machine with four GPUs of a fake driver, and runs that share a GPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.gpu_machine import Machine, gpus_of
from tests.support.processes import wait_until


@pytest.fixture
def machine(tmp_path: Path, nvml_library: Path) -> Machine:
    return Machine(tmp_path, nvml_library)


@pytest.mark.slow
def test_a_run_gets_gpus_that_neither_a_run_nor_the_driver_has(machine: Machine) -> None:
    machine.says("1 pid 4242", "2 used 2000000000")
    first = machine.start("--gpus", "free:1", waits=True)
    first.wait_for("runs on 0 attempt")
    second = machine.run("--gpus", "free", "--nproc-per-node", "1")
    third = machine.run("--gpus", "free:2")
    (ended,) = machine.end(first)
    assert ended.returncode == second.returncode == 0
    assert gpus_of(second) == ["3"]
    assert third.returncode == 82
    assert "too few GPUs of" in third.err
    assert "are free: 1 of 4, and the run needs 2" in third.err
    user = r"GPU 0: run \S+ of \S+ \(pid \d+, since \d\d:\d\d\)"
    assert re.search(user, third.err)
    assert "GPU 1: process 4242 uses it already" in third.err
    assert "GPU 2: 1.9 GB of its memory are in use" in third.err
    assert os.listdir(machine.locks) == []


@pytest.mark.slow
def test_two_runs_of_one_moment_get_different_gpus_and_keep_them_over_a_restart(machine: Machine) -> None:
    jobs = [
        machine.start("--gpus", "free:2", "--max-restarts", "1", "--nproc-per-node", "1", waits=True, FAIL="1")
        for _ in range(2)
    ]
    for job in jobs:
        job.wait_for("runs on")
    found = [gpus_of(job) for job in machine.end(*jobs)]
    assert [len(gpus) for gpus in found] == [2, 2]
    assert sorted({*found[0], *found[1]}) == ["0,1", "2,3"]


@pytest.mark.slow
def test_free_alone_takes_all_free_gpus_with_a_worker_for_each(machine: Machine) -> None:
    machine.says("0 pid 4242")
    assert gpus_of(machine.run("--gpus", "free")) == ["1,2,3"] * 3
    assert gpus_of(machine.run("--gpus", "free", "--gpus-per-proc", "2")) == ["1,2"]


@pytest.mark.slow
def test_what_the_environment_gives_is_what_is_chosen_from(machine: Machine) -> None:
    machine.says("2 pid 4242")
    assert gpus_of(machine.run("--gpus", "free:1", CUDA_VISIBLE_DEVICES="2,3")) == ["3"]
    assert gpus_of(machine.run("--gpus", "free:1", CUDA_VISIBLE_DEVICES="GPU-0000-2,GPU-0000-1")) == ["GPU-0000-1"]
    assert gpus_of(machine.run("--gpus", "free:1", CUDA_VISIBLE_DEVICES="MIG-a,MIG-b")) == ["MIG-a"]
    refused = machine.run("--gpus", "free:2", CUDA_VISIBLE_DEVICES="2,3")
    assert "1 of 2 that CUDA_VISIBLE_DEVICES=2,3 leaves visible, and the run needs 2" in refused.err
    more = machine.run("--gpus", "free:3", CUDA_VISIBLE_DEVICES="2,3")
    assert (more.returncode, "has 2 GPUs that CUDA_VISIBLE_DEVICES=2,3" in more.err) == (2, True)


def test_gpus_in_mig_mode_are_left_out_and_others_are_named_by_their_uuids(machine: Machine) -> None:
    machine.says("0 mig 1 1")
    assert gpus_of(machine.run("--gpus", "free:1")) == ["GPU-0000-1"]


@pytest.mark.slow
def test_a_run_that_takes_a_gpu_of_another_run_warns(machine: Machine) -> None:
    first = machine.start("--gpus", "1", waits=True)
    first.wait_for("runs on")
    warned = machine.run("--gpus", "1,2")
    alone = machine.run("--gpus", "0")
    machine.end(first)
    pattern = r"warning: another run uses GPU 1 on \S+: run \S+ of \S+ \(pid \d+, since \d\d:\d\d\); --gpus free"
    assert re.search(pattern, warned.err)
    assert (warned.returncode, alone.returncode) == (0, 0)
    assert "another run" not in alone.err


def test_a_register_that_cannot_be_used_stops_only_runs_that_need_it(machine: Machine) -> None:
    machine.locks.symlink_to(machine.folder)
    refused = machine.run("--gpus", "free:1")
    plain = machine.run("--gpus", "1", "-v")
    assert refused.returncode == 82
    assert "the register in" in refused.err
    assert plain.returncode == 0
    assert "other runs do not learn which GPUs this run uses" in plain.err


def test_a_driver_that_does_not_answer_is_named(machine: Machine) -> None:
    machine.says("error nvmlDeviceGetCount_v2 999")
    refused = machine.run("--gpus", "free:1", CUDA_VISIBLE_DEVICES="0")
    assert refused.returncode == 82
    assert "nobody knows which GPUs of" in refused.err


def test_in_a_dry_run_all_gpus_are_free(machine: Machine) -> None:
    assert machine.run("--dry-run", "--gpus", "free:2").returncode == 0
    assert machine.run("--dry-run", "--gpus", "free", "--nproc-per-node", "2").returncode == 0
    assert machine.run("--dry-run", "--gpus", "free").returncode == 2


@pytest.mark.slow
def test_the_gpus_of_a_killed_agent_are_free_once_its_worker_is_dead(machine: Machine) -> None:
    for _ in range(3):
        job = machine.start("--gpus", "free:4", waits=True)
        job.wait_for("runs on", 4)
        os.kill(job.agent_pid(), signal.SIGKILL)
        assert job.finish().returncode == 84
        wait_until(lambda: gpus_of(machine.run("--gpus", "free:4", "--nproc-per-node", "1")) == ["0,1,2,3"], 30)


@pytest.mark.slow
def test_runs_that_are_killed_at_random_lose_no_gpu_get_none_twice_and_keep_their_order(tmp_path: Path) -> None:
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        sys.executable,
        runs.PROGRAMS / "kill_gpu_holders.py",
        "200",
    ]
    environ = {**os.environ, "DDPLAUNCH_LOCK_DIR": str(tmp_path / "locks"), "PYTHONPATH": str(runs.ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 killed" in done.stdout
