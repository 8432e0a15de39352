"""``ddplaunch`` inside salloc or sbatch, without srun: it starts its agents through srun itself."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from ddplaunch.errors import NODE_LOST
from tests.process.test_nodes_meet import SUM, WAIT
from tests.slurm.test_srun import job_of, sums
from tests.support.processes import children, command_line, wait_until
from tests.support.repositories import repository
from tests.support.runs import PROGRAMS, ROOT, TIMEOUT_S, Running, command
from tests.support.slurm import ASK_S, Slurm

pytestmark = pytest.mark.slurm


def salloc(slurm: Slurm, options: str, *arguments: str | Path) -> Running:
    return slurm.start(["salloc", *options.split(), *command(*arguments)], env={"OMP_NUM_THREADS": "1"})


def test_all_nodes_of_the_allocation_run_one_job(slurm: Slurm, script: Path):
    script.write_text(SUM)
    # Counts of the job that must not count for the agents' steps.
    done = salloc(slurm, "-N2 --ntasks-per-node=2 -c2", "-v", "--nproc-per-node", "2", script).finish()
    assert done.returncode == 0, done.err
    assert sums(done.out) == [(f"node0{n // 2 + 1}", f"4 {n} {n % 2} 4 2 {n // 2} 2 0") for n in range(4)]
    assert re.search(r"SLURM job \d+: 2 nodes \(node\[01-02\]\), not in a step of srun", done.err)
    assert "warning" not in done.err


def test_a_rank_that_fails_ends_the_job_with_one_page_and_its_code(slurm: Slurm, tmp_path: Path):
    line = shlex.join(command("--nproc-per-node", "1", PROGRAMS / "exit_with.py", "1=code:7"))
    job = slurm.batch(line, tmp_path / "log", "-N2")
    job.wait_in("FAILED")
    assert job.field("ExitCode") == "7:0"
    assert job.text.count("on node02 failed: ") == 1


def test_log_files_of_all_nodes_are_brought(slurm: Slurm):
    here = ("--collect-logs", "-x", "XDG_STATE_HOME=/run/state")  # Each node has a /run of its own.
    program = (PROGRAMS / "write_logs.py", "300000")
    done = salloc(slurm, "-N2", *here, "--nproc-per-node", "1", "--max-restarts", "1", *program).finish()
    assert done.returncode == 0, done.err
    assert re.search(rf"logs of 2 ranks \(.*\) from 2 nodes are in {done.run_dir}", done.err)
    assert [(done.run_dir / node / "attempt_1/0/stdout.log").stat().st_size for node in ("node01", "node02")] == [
        300_000
    ] * 2


def test_an_agent_that_is_lost_is_replaced_by_a_spare(slurm: Slurm, script: Path):
    script.write_text(WAIT)
    running = salloc(slurm, "-N3", "--nnodes", "2", "--nproc-per-node", "1", script)
    running.wait_for("runs", 2)
    agent = next(pid for pid, line in slurm.leftovers()["node02"].items() if "DDPLAUNCH_START" in line)
    os.kill(agent, signal.SIGKILL)
    running.wait_for(r"\[node03:1\] runs 1 2 0")
    os.kill(launcher_pid(running), signal.SIGINT)
    assert running.finish().returncode == 130


def launcher_pid(running: Running) -> int:
    """The child of salloc, which would keep a signal to itself."""
    return next(pid for pid in children(running.pid) if "-m ddplaunch" in command_line(pid))


def test_commands_about_the_run_reach_its_nodes_as_the_run_does(slurm: Slurm):
    """There is no SSH server on them: ``--ps`` and ``--kill`` start their agents through srun, too."""
    program = ("--nproc-per-node", "1", "--no-python", "sh", "-c", "echo begins; exec sleep 1000")
    running = salloc(slurm, "-N2 --job-name=asked", "--rdzv-id", "asked", *program)
    running.wait_for("begins", 2)
    inside = {"SLURM_JOB_ID": job_of(slurm, "asked"), "SLURM_JOB_NODELIST": "node[01-02]"}
    listed = slurm.start(command("--ps", "--hosts", "node01,node02"), env=inside).finish()
    assert listed.returncode == 0, listed.err
    assert re.search(r"running .* lab,node\[01-02\] .* 2 workers", listed.out), listed.out
    killed = slurm.start(command("--kill", "asked", "--hosts", "node01,node02"), env=inside).finish()
    assert killed.returncode == 0, killed.err
    assert re.search("node02: .*1 worker", killed.err)
    assert running.finish().returncode == 128 + signal.SIGTERM


def test_the_template_for_sbatch_works_as_it_stands(slurm: Slurm, script: Path, tmp_path: Path):
    """With the code that was there when the job was submitted, as docs/snapshots.md says it."""
    script.write_text(SUM)
    template, log = ROOT / "scripts/slurm/train.sbatch", tmp_path / "out.log"
    taken = slurm.start(command("--take-snapshot", script)).finish()
    script.write_text("raise SystemExit('edited')")
    env = {"OMP_NUM_THREADS": "1", "DDPLAUNCH": " ".join(command()), "DDPLAUNCH_SNAPSHOT": taken.out.strip()}
    options = ["--parsable", "--nodes=2", "--output", str(log)]
    sbatch = slurm.start(["sbatch", *options, template, "--nproc-per-node", "1", script], env=env).finish()
    assert sbatch.returncode == 0, sbatch.err
    wait_until(
        lambda: "JobState=COMP" in slurm.run("scontrol", "show", "job", sbatch.out.strip()), TIMEOUT_S, "", ASK_S
    )
    wait_until(lambda: slurm.is_idle, TIMEOUT_S, "", ASK_S)
    text = log.read_text()
    assert "ExitCode=0:0" in slurm.run("scontrol", "show", "job", sbatch.out.strip()), text
    assert [line.split()[:2] for _, line in sums(text)] == [["2", "0"], ["2", "1"]]


def test_code_goes_to_the_nodes_through_srun(slurm: Slurm, tmp_path: Path):
    """Each node has a home of its own; there is no SSH server on them."""
    root = repository(tmp_path / "project", {"train.py": "import lib; print('runs', lib.__file__)", "lib.py": ""})
    options = ("-v", "--sync", "-x", "HOME=/run/home", "--nproc-per-node", "1", "--log-dir", tmp_path / "logs")
    for sent in ("sent [1-9]", "sent 0 B"):
        running = slurm.start(["salloc", "-N2", *command(*options, "train.py")], {"OMP_NUM_THREADS": "1"}, cwd=root)
        done = running.finish()
        assert done.returncode == 0, done.err
        assert len(re.findall(r"runs /run/home/.local/state/ddplaunch/snapshots/\S+/lib.py", done.out)) == 2, done.out
        assert re.search(sent, done.err), done.err


def test_signals_of_scancel_reach_the_workers(slurm: Slurm):
    """USR1 is passed on, as SLURM's warning before a time limit; SIGTERM, as preemption's, lets them end well."""
    options = ("--nproc-per-node", "2", "--requeue-on", "TERM")
    running = salloc(slurm, "-N2 --job-name=warned", *options, PROGRAMS / "print_signals.py")
    running.wait_for("ready", 4)
    job = job_of(slurm, "warned")
    slurm.run("scancel", "--signal=USR1", job)
    running.wait_for("got SIGUSR1", 4)
    slurm.run("scancel", "--signal=TERM", job)
    running.wait_for("got SIGTERM", 4)
    running.wait_for("bye", 4)
    done = running.finish()
    assert done.returncode == 128 + signal.SIGTERM
    # What SLURM does not do is said, twice: when it can be changed, and at the end.
    assert f"SLURM requeues only jobs of sbatch, and job {job} is none" in done.err
    assert f"SLURM did not requeue job {job}: " in done.err


def test_a_detached_run_ends_with_its_allocation_and_can_be_attached_to(slurm: Slurm):
    """Its launcher is in the job's shell, and its agents are steps of the job."""
    begins = ("--nproc-per-node", "1", "--no-python", "sh", "-c", "echo begins; exec sleep 1000")
    script = f'id=$({shlex.join(command("--detach", *begins))}) && {shlex.join(command("--attach"))} "$id"'
    allocation = slurm.start(["salloc", "-N2", "--quiet", "--job-name=left", "sh", "-c", script])
    allocation.wait_for("begins", 2)
    job = job_of(slurm, "left")
    allocation.wait_for(rf"the run goes on without this terminal, until SLURM job {job} ends")
    [ready] = allocation.wait_for(r"run (\S+); Ctrl-C leaves it")
    slurm.run("scancel", job)
    code = slurm.start(command("--wait", ready[1])).finish().returncode
    assert code == allocation.finish().returncode
    assert code in (NODE_LOST, 128 + signal.SIGTERM), "SLURM's SIGTERM to the agents, or the end of their steps"
