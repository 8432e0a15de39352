"""A node that must not be used again leaves the run after an attempt, and its logs, agent and launcher end in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.runs import Running, meeting, run, start

HARDWARE = 88
AGENT = """
import os, socket, sys
if "HOST" in os.environ:
    socket.gethostname = lambda: os.environ["HOST"]
if any("agent.main" in argument for argument in sys.orig_argv):
    from dataclasses import replace
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    finish = WorkerGroup.finish
    text = "Xid 79, GPU 3 has fallen off the bus"
    WorkerGroup.finish = lambda self, *given: tuple(
        replace(ended, hardware=text if ended.returncode == 7 else "") for ended in finish(self, *given)
    )
"""
SCRIPT = """
import os, pathlib, sys, time
rank, size, restarts = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
print(f"rank {rank} of {size} after {restarts} restarts", flush=True)
marker, broken = pathlib.Path(sys.argv[1]), sys.argv[2]
if rank == broken and not marker.exists():
    while len(list(marker.parent.glob("rank_*"))) < int(size) - 1:
        time.sleep(0.02)
    marker.touch()
    sys.exit(7)
first = not marker.exists()
(marker.parent / f"rank_{rank}").touch()
time.sleep(60 if first else 0)
"""


class Job:
    """A job of which one rank fails once; its agent takes that for a fault of the hardware."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "sitecustomize.py").write_text(AGENT)
        (folder / "train.py").write_text(SCRIPT)

    def arguments(self, broken: int) -> tuple[str, ...]:
        return ("--nproc-per-node", "1", str(self._folder / "train.py"), str(self._folder / "failed"), str(broken))

    @property
    def environ(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join((str(self._folder), os.environ.get("PYTHONPATH", "")))}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.slow
def test_a_spare_replaces_the_node_also_if_it_serves_the_rendezvous(job: Job) -> None:
    done = run("--dry-run", "--nnodes", "2", "--hosts", "a,b,c", *job.arguments(0), env=job.environ)
    assert done.returncode == 0, done.err
    assert "a is not used again: Xid 79, GPU 3 has fallen off the bus" in done.err
    assert "c replaces a" in done.err
    for place in ("c:0", "b:1"):
        assert f"[{place}] rank {place[-1]} of 2 after 0 restarts" in done.out
    assert not done.report["unreachable_hosts"]
    first, second = done.report["attempts"]
    assert first["node_leaves"].startswith("a is not used again")
    assert (first["outcome"], second["outcome"], second["restart_count"]) == ("failed", "succeeded", 0)


def test_the_run_ends_with_its_own_exit_code_if_too_few_nodes_are_left(job: Job) -> None:
    done = run("--dry-run", "--nnodes", "2", "--max-restarts", "3", *job.arguments(1), env=job.environ)
    assert done.returncode == HARDWARE, done.err
    assert "no further attempt: node1 is not used again: Xid 79" in done.err
    assert "1 node is left, and 2 are needed" in done.err
    assert done.report["first_failure"]["hardware"]


def test_a_single_node_is_not_restarted(job: Job) -> None:
    done = run("--max-restarts", "3", *job.arguments(0), env=job.environ)
    assert done.returncode == HARDWARE, done.err
    assert "there is no other node" in done.err


@pytest.mark.slow
def test_nodes_with_a_launcher_each_go_on_without_it(job: Job) -> None:
    conf = "last_call_timeout=1,keep_alive_interval=0.5"
    options = ("--nnodes", "1:2", *meeting())

    def node(host: str) -> Running:
        return start(*options, "--rdzv-conf", conf, *job.arguments(1), env={**job.environ, "HOST": host})

    first = node("gpu1")
    first.wait_for("rank 0 of 1")
    second = node("gpu2")
    left, stayed = second.finish(), first.finish()
    assert (left.returncode, stayed.returncode) == (HARDWARE, 0), stayed.err
    assert "the other nodes go on" in left.err
    assert stayed.out.count("rank 0 of 1 after 0 restarts") == 2
