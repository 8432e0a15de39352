"""``srun ddplaunch``: one task per node, or one per worker, of a real SLURM."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.process.test_nodes_meet import SUM
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, Finished, Running, command
from tests.support.slurm import Slurm

pytestmark = pytest.mark.slurm

EXIT_WITH = PROGRAMS / "exit_with.py"

TOGETHER = """
import os, pathlib, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.02)
"""


def srun(slurm: Slurm, options: str, *arguments: str | Path) -> Running:
    return slurm.start(["srun", *options.split(), *command(*arguments)], env={"OMP_NUM_THREADS": "1"})


def sums(text: str) -> list[str]:
    """Host, and what its rank printed."""
    return sorted(re.findall(r"\[(\w+):\d+\] sum (.*)", text), key=lambda found: int(found[1].split()[1]))


def folders(done: Finished) -> tuple[set[str], list[str]]:
    """Names of the run folder, and of the launchers' folders in it."""
    paths = [Path(text) for text in re.findall(r", logs in (\S+)", done.err)]
    assert all((path / "report.json").exists() for path in paths)
    return {path.parent.name for path in paths}, sorted(path.name for path in paths)


def job_of(slurm: Slurm, name: str) -> str:
    return wait_until(lambda: slurm.run("squeue", "--noheader", "--name", name, "--format=%i").strip())


def test_a_task_per_node_is_a_node_of_one_job(slurm: Slurm, script: Path):
    script.write_text(SUM)
    done = srun(slurm, "-N3 --ntasks-per-node=1", "-v", "--nproc-per-node", "2", script).finish()
    assert done.returncode == 0, done.err
    assert sums(done.out) == [(f"node0{n // 2 + 1}", f"6 {n} {n % 2} 6 2 {n // 2} 3 0") for n in range(6)]
    numbers = re.findall(r"SLURM job \d+, step 0: node (\d) of 3 \(node\[01-03\]\)", done.err)
    places = re.findall(r"node (\d) of 3, 6 workers in all, ranks (\d)-", done.err)
    assert sorted(numbers) == ["0", "1", "2"]
    assert sorted(places) == [("0", "0"), ("1", "2"), ("2", "4")], "the same numbers of the nodes"
    assert "warning" not in done.err
    assert folders(done)[1] == ["node01", "node02", "node03"]


BATCH = """
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)

srun %s \\
--nnodes $SLURM_NNODES \\
--nproc_per_node 1 \\
--node_rank=$SLURM_NODEID \\
--rdzv_id $SLURM_JOB_ID \\
--rdzv_backend c10d \\
--rdzv_endpoint $head_node_ip:29500 \\
%s
"""
"""As public scripts have it, with torchrun: the shell of the batch script makes 0 of $SLURM_NODEID on all nodes."""


def test_a_node_rank_that_the_batch_scripts_shell_has_replaced_is_that_of_the_step(
    slurm: Slurm, script: Path, tmp_path: Path
):
    script.write_text(SUM)
    line = f"exec bash -c {shlex.quote(BATCH % (shlex.join(command()), script))}"
    job = slurm.batch(line, tmp_path / "log", "-N3", "--ntasks-per-node=1")
    job.wait_in("COMPLETED")
    assert sums(job.text) == [(f"node0{n + 1}", f"3 {n} 0 3 1 {n} 3 0") for n in range(3)]
    assert re.findall("warning: (.*)", job.text) == [
        "--node-rank is 0 on a node that is 1 by SLURM: the shell of a batch script makes 0 of $SLURM_NODEID; nodes "
        "without the endpoint's address take the number of SLURM"
    ]


def test_a_rank_that_fails_ends_the_step_with_its_code(slurm: Slurm):
    done = srun(slurm, "-N3 --ntasks-per-node=1", "--nproc-per-node", "1", EXIT_WITH, "1=code:7").finish()
    assert done.returncode == 7
    assert len(re.findall("on node02 failed: ", done.err)) == 3
    assert len(re.findall("the job failed", done.err)) == 1
    assert (
        len(re.findall("ddplaunch: rank 1 on node02 failed: exit code 7; the launcher on node02 shows", done.err)) == 2
    )


def test_a_usage_error_is_shown_once(slurm: Slurm):
    done = srun(slurm, "-N3 --ntasks-per-node=1", "--nproc-per-node", "none", EXIT_WITH).finish()
    assert done.returncode == 2
    assert len(re.findall("ddplaunch: error: ", done.err)) == 1


def test_two_steps_of_one_job_at_once_do_not_mix(slurm: Slurm, script: Path, tmp_path: Path):
    script.write_text(TOGETHER + SUM)
    files = [tmp_path / "a", tmp_path / "b"]
    lines = [
        " ".join(["srun --overlap --ntasks-per-node=1", *command("--nproc-per-node", "1", script, *map(str, order))])
        for order in (files, files[::-1])
    ]
    shell = f"{lines[0]} & {lines[1]}; code=$?; wait $! && exit $code"
    done = slurm.start(["salloc", "-N2", "--quiet", "sh", "-c", shell], env={"OMP_NUM_THREADS": "1"}).finish()
    assert done.returncode == 0, done.err
    assert [line.split()[:2] for _, line in sums(done.out)] == [["2", "0"], ["2", "0"], ["2", "1"], ["2", "1"]]


def test_a_task_per_worker_becomes_that_worker(slurm: Slurm, script: Path):
    script.write_text(SUM)
    done = srun(slurm, "-N2 --ntasks-per-node=2", script).finish()
    assert done.returncode == 0, done.err
    assert sums(done.out) == [(f"node0{n // 2 + 1}", f"4 {n} {n % 2} 4 2 {n // 2} 2 0") for n in range(4)]
    (run_id,), names = folders(done)
    assert re.fullmatch(r"slurm-\d+\.0\.0", run_id)
    assert names == ["node01.0", "node01.1", "node02.2", "node02.3"]


def test_a_node_alone_needs_nobody(slurm: Slurm, script: Path):
    script.write_text(SUM)
    done = srun(slurm, "-N1", "--nproc-per-node", "2", script).finish()
    assert (done.returncode, len(sums(done.out))) == (0, 2), done.err


def test_signals_of_scancel_reach_the_workers(slurm: Slurm):
    running = srun(slurm, "-N3 --ntasks-per-node=1 --job-name=waits", PROGRAMS / "print_signals.py")
    running.wait_for("ready", 3)
    job = job_of(slurm, "waits")
    slurm.run("scancel", "--signal=USR1", job)
    running.wait_for("got SIGUSR1", 3)
    slurm.run("scancel", job)
    running.wait_for("got SIGTERM", 3)
    done = running.finish()
    assert done.returncode != 0
    assert "stopped" in done.err
