"""Nodes of one launcher are lost, by dry runs of real agents: the world shrinks, a spare comes, or the run ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import children, command_line, wait_until
from tests.support.runs import PROGRAMS, Running, start

NODE_LOST = 84
ROUNDS = PROGRAMS / "rounds.py"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "end")


class Job:
    """A gloo job that all-reduces until it is told to end, one worker per pretended node."""

    def __init__(self, end: Path) -> None:
        self._end = end
        self.running: Running

    def start(self, *options: str) -> None:
        self.running = start("--dry-run", "--nproc-per-node", "1", *options, ROUNDS, self._end)

    def agents(self) -> list[int]:
        """By the number of their node."""
        return wait_until(
            lambda: sorted(pid for pid in children(self.running.pid) if "agent.main" in command_line(pid))
        )

    def wait_for_world(self, size: int, hosts: str) -> None:
        """All ranks of such a world, on hosts in the order of ranks, have met."""
        for rank, host in enumerate(hosts.split(",")):
            self.running.wait_for(rf"\[{host}:{rank}\] rank {rank} of {size} ")

    def end(self) -> None:
        self._end.touch()


def test_the_world_shrinks_when_a_node_is_lost(job: Job) -> None:
    job.start("--nnodes", "2:3")
    job.wait_for_world(3, "node0,node1,node2")
    os.kill(job.agents()[1], signal.SIGKILL)
    job.wait_for_world(2, "node0,node2")
    job.end()
    finished = job.running.finish()
    assert finished.returncode == 0, finished.err
    assert "the agent on node1 ended by SIGKILL; the job goes on" in finished.err
    assert [attempt["restarts"] for attempt in finished.report["attempts"]] == [True, False]


def test_the_rendezvous_moves_when_the_node_that_serves_it_is_lost(job: Job) -> None:
    job.start("--nnodes", "2:3")
    job.wait_for_world(3, "node0,node1,node2")
    os.kill(job.agents()[0], signal.SIGKILL)
    job.wait_for_world(2, "node1,node2")
    os.kill(job.agents()[0], signal.SIGKILL)  # Too few are left now.
    finished = job.running.finish()
    assert finished.returncode == NODE_LOST
    assert "error: the agent on node1 ended by SIGKILL; its workers are gone" in finished.err


def test_a_spare_takes_the_rank_of_a_lost_node_and_the_others_keep_theirs(job: Job) -> None:
    job.start("--nnodes", "2", "--hosts", "a,b,c")
    job.wait_for_world(2, "a,b")
    os.kill(job.agents()[0], signal.SIGKILL)
    job.wait_for_world(2, "c,b")
    job.end()
    finished = job.running.finish()
    assert finished.returncode == 0, finished.err
    assert "c takes the place of a" in finished.err


def test_a_run_without_spares_ends_and_names_the_node(job: Job) -> None:
    job.start("--nnodes", "2")
    job.wait_for_world(2, "node0,node1")
    os.kill(job.agents()[1], signal.SIGKILL)
    finished = job.running.finish()
    assert finished.returncode == NODE_LOST
    assert "error: the agent on node1 ended by SIGKILL; its workers are gone" in finished.err
    assert finished.report["outcome"] == "failed"


def test_a_rendezvous_process_that_is_killed_is_replaced(job: Job) -> None:
    job.start("--nnodes", "2")
    job.wait_for_world(2, "node0,node1")
    [member] = [pid for pid in children(job.agents()[0]) if command_line(pid).startswith("ddplaunch member")]
    os.kill(member, signal.SIGKILL)
    job.running.wait_for("the nodes meet anew")
    job.running.wait_for(r"rank \d of 2 in round 1", 2)
    job.end()
    assert job.running.finish().returncode == 0
