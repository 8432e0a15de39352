"""``--wait-for-gpus`` on a machine with four GPUs of a fake driver: order, signals, the end of the time, ``--ps``."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddplaunch.features.free_gpus import register
from ddplaunch.features.free_gpus.records import GpuUser
from ddplaunch.features.free_gpus.register import OwnFile
from tests.support import runs
from tests.support.gpu_machine import Machine, gpus_of
from tests.support.processes import wait_until
from tests.support.runs import Running


@pytest.fixture
def machine(tmp_path: Path, nvml_library: Path) -> Machine:
    return Machine(tmp_path, nvml_library)


Free = Callable[[], None]


@pytest.fixture
def free(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Free]:
    """This process has all GPUs in the register, until the function is called."""
    monkeypatch.setenv(register.FOLDER_VARIABLE, str(machine.locks))
    pid = os.getpid()
    gpus = tuple(f"GPU-0000-{index}" for index in range(4))
    with register.locked(5.0) as opened:
        run = GpuUser(pid=pid, run_id="job7", since_s=time.time(), gpus=gpus, processes=(register.started(pid),))
        own = OwnFile(opened, run)
    has_ended: list[bool] = []

    def end() -> None:
        if not has_ended:
            has_ended.append(True)
            own.remove()

    yield end
    end()


def waiting(machine: Machine, count: int, *options: str, place: str = "1 of 1") -> Running:
    job = machine.start("--gpus", f"free:{count}", "--wait-for-gpus", "1h", *options)
    job.wait_for(f"waiting for {count} GPUs of" if count > 1 else "waiting for 1 GPU of")
    job.wait_for(f"place {place}")
    return job


@pytest.mark.slow
def test_runs_get_gpus_in_the_order_in_which_they_came(machine: Machine) -> None:
    first = machine.start("--gpus", "free:3", "--nproc-per-node", "1", waits=True)
    first.wait_for("runs on 0,1,2 attempt")
    big = waiting(machine, 2, "--nproc-per-node", "1")
    small = waiting(machine, 1, place="2 of 2")
    refused = machine.run("--gpus", "free:1")
    assert refused.returncode == 82
    assert "0 of 4, and the run needs 1; 2 runs waited before it" in refused.err
    assert re.search(r"GPUs 0, 1, 2: run \S+ of \S+ \(pid \d+, since \d\d:\d\d\)", refused.err)
    assert re.search(r"run \S+ of \S+ \(pid \d+, since \d\d:\d\d\) waits for 2 GPUs before", refused.err)
    ended = machine.end(first, big, small)
    assert [each.returncode for each in ended] == [0, 0, 0]
    assert (gpus_of(ended[1]), len(gpus_of(ended[2]))) == (["0,1"], 1)
    assert os.listdir(machine.locks) == []


@pytest.mark.slow
def test_the_wait_is_in_the_files_of_the_run(machine: Machine, free: Free) -> None:
    job = waiting(machine, 2)
    free()
    ended = job.finish()
    assert ended.returncode == 0
    assert ended.report["waited_for_gpus_s"] > 0
    noted = [json.loads(line) for line in (ended.run_dir / "events.jsonl").read_text().splitlines()]
    found = {event["event"]: event for event in noted}
    assert found["gpus_awaited"]["place"] == 1
    assert found["gpus_taken"]["s"] == ended.report["waited_for_gpus_s"]


@pytest.mark.parametrize(
    ("signum", "is_to_agent", "code"),
    [(signal.SIGINT, False, 130), (signal.SIGTERM, False, 143), (signal.SIGTERM, True, 84), (signal.SIGKILL, True, 84)],
)
def test_a_run_that_waits_can_be_stopped(
    machine: Machine, free: Free, signum: int, is_to_agent: bool, code: int
) -> None:
    job = waiting(machine, 2)
    os.kill(job.agent_pid() if is_to_agent else job.pid, signum)
    assert job.finish().returncode == code
    # The file of an agent that was killed goes when the next one looks.
    assert machine.run("--gpus", "free:1").err.count("GPU") == 2
    assert len(os.listdir(machine.locks)) == 1


def test_the_end_of_the_launcher_ends_the_wait(machine: Machine, free: Free) -> None:
    job = waiting(machine, 2)
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: len(os.listdir(machine.locks)) == 1, 20)
    job.finish()


def test_when_the_time_is_over_the_run_says_who_has_the_gpus(machine: Machine, free: Free) -> None:
    ended = machine.run("--gpus", "free:2", "--wait-for-gpus", "1s")
    assert ended.returncode == 82
    assert "are free: 0 of 4, and the run needs 2; it has waited for 1 s" in ended.err
    assert re.search(r"^  GPUs 0, 1, 2, 3: run \S+ of \S+ \(pid \d+", ended.err, re.MULTILINE)


@pytest.mark.slow
def test_other_programs_are_waited_for_too(machine: Machine) -> None:
    machine.says(*(f"{index} pid 4242" for index in range(4)))
    job = waiting(machine, 2, "--nproc-per-node", "1")
    machine.says("0 pid 4242", "2 used 2000000000")
    ended = job.finish()
    assert gpus_of(ended) == ["1,3"]
    assert "GPUs 0, 1, 2, 3: process 4242 uses it already" in ended.err


@pytest.mark.slow
def test_a_driver_that_falls_silent_ends_no_wait(machine: Machine, free: Free) -> None:
    job = waiting(machine, 1)
    machine.says("error nvmlDeviceGetCount_v2 999")
    job.wait_for("nobody knows which GPUs of")
    machine.says()
    free()
    assert gpus_of(job.finish()) == ["0"]


@pytest.mark.slow
def test_a_process_that_keeps_the_register_locked_is_named_and_waited_for(machine: Machine, free: Free) -> None:
    job = waiting(machine, 1)
    with register.locked(5.0):
        job.wait_for(rf"waiting for GPUs of .*: process {os.getpid()} of \S+ has locked it for 1 s")
    free()
    assert gpus_of(job.finish()) == ["0"]


@pytest.mark.slow
def test_a_suspended_run_lets_others_pass_and_goes_on_later(machine: Machine) -> None:
    machine.says(*(f"{index} pid 4242" for index in range(4)))
    first = waiting(machine, 4, "--nproc-per-node", "1")
    agent = first.agent_pid()
    os.kill(agent, signal.SIGSTOP)
    second = waiting(machine, 4, "--nproc-per-node", "1")
    machine.says()
    assert gpus_of(second.finish()) == ["0,1,2,3"]
    os.kill(agent, signal.SIGCONT)
    assert gpus_of(first.finish()) == ["0,1,2,3"]


@pytest.mark.slow
def test_ps_shows_gpus_holders_and_runs_that_wait(machine: Machine, free: Free) -> None:
    detached = machine.run("--gpus", "free:2", "--wait-for-gpus", "1h", "--detach")
    assert detached.returncode == 0
    other = waiting(machine, 1, place="2 of 2")
    shown = runs.run("--ps", "--gpus", env=machine.environ)
    run_id = detached.out.strip()
    for index in range(4):
        pattern = rf" {index}    Fake H100  4\.0 MB of 80 GB  run \S+ of \S+ \(pid \d+, since \d\d:\d\d\)"
        assert re.search(pattern, shown.out)
    assert re.search(rf"^waiting on \S+: 1\. run {run_id} of .*, for 2 GPUs\nwaiting on \S+: 2\. run", shown.out, re.M)
    listed = runs.run("--ps", env=machine.environ)
    assert re.search(rf"^{run_id}  waiting ", listed.out, re.MULTILINE)
    free()
    other.finish()
    assert runs.run("--wait", run_id, env=machine.environ).returncode == 0


def test_a_run_is_not_named_to_others_if_its_user_hides_it(machine: Machine) -> None:
    job = machine.start("--gpus", "0", waits=True, DDPLAUNCH_HIDE_RUN="1")
    job.wait_for("runs on 0 attempt")
    shown = runs.run("--ps", "--gpus", env=machine.environ)
    machine.end(job)
    assert re.search(r" 0 .*  a run of \S+ \(pid \d+, since", shown.out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "0,1"), "--gpus names some"),
        (("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "h:1"), "a run of several nodes cannot wait"),
    ],
)
def test_what_cannot_wait_is_refused(machine: Machine, options: tuple[str, ...], message: str) -> None:
    refused = machine.run(*options, "--wait-for-gpus", "1h")
    assert (refused.returncode, message in refused.err) == (2, True)


def test_the_plan_names_the_wait(machine: Machine) -> None:
    plan = machine.run("--wait-for-gpus", "2h", "--plan")
    assert "the run waits for GPUs that nobody uses, for at most 2 h" in plan.out
