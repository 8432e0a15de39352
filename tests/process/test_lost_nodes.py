"""Nodes of one launcher are lost, by dry runs of real agents: the world shrinks, a spare comes, or the run ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import children, command_line, wait_until
from tests.support.runs import PROGRAMS, Running, start

RENDEZVOUS, NODE_LOST = 83, 84
ROUNDS = PROGRAMS / "rounds.py"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "end")


class Job:
    """A gloo job that all-reduces until it is told to end, one worker per pretended node."""

    def __init__(self, end: Path) -> None:
        self._end = end
        self.running: Running

    def start(self, *options: str, program: Path = ROUNDS, arguments: Iterable[Path] = ()) -> None:
        self.running = start("--dry-run", "--nproc-per-node", "1", *options, program, self._end, *arguments)

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


def test_the_rendezvous_moves_when_the_node_that_serves_it_is_lost(job: Job) -> None:
    job.start("--nnodes", "2:3")
    job.wait_for_world(3, "node0,node1,node2")
    os.kill(job.agents()[0], signal.SIGKILL)
    job.wait_for_world(2, "node1,node2")
    os.kill(job.agents()[0], signal.SIGKILL)  # Too few are left now.
    finished = job.running.finish()
    assert finished.returncode == NODE_LOST
    assert "the job failed ===" in finished.err
    too_few = "no further attempt: 1 node is left, and 2 are needed"
    assert f"\nthe agent on node1 was killed by SIGKILL; {too_few}\n" in finished.err
    assert "\nleft:     nothing" in finished.err


def test_a_rendezvous_process_that_is_killed_is_replaced(job: Job) -> None:
    job.start("--nnodes", "2")
    job.wait_for_world(2, "node0,node1")
    os.kill(member(job.agents()[0]), signal.SIGKILL)
    job.running.wait_for("the nodes start a new one")
    job.running.wait_for(r"rank \d of 2 in round 1", 2)
    job.end()
    assert job.running.finish().returncode == 0


def test_a_rendezvous_that_is_lost_again_and_again_ends_the_run(job: Job) -> None:
    """Whatever kills its processes, the nodes do not start new ones for ever."""
    job.start("--nnodes", "2")
    wait_until(lambda: len(job.agents()) == 2)
    agents = job.agents()

    def kills_members_until_the_end() -> bool:
        for pid in [pid for agent in agents for pid in children(agent) if "member" in command_line(pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return job.running.process.poll() is not None

    wait_until(kills_members_until_the_end, 60.0)
    finished = job.running.finish()
    assert finished.returncode == RENDEZVOUS, finished.err
    assert finished.err.count("the nodes start a new one") == 4
    assert re.search(r"error: node\d cannot join the rendezvous", finished.err)


TIDIES_UP = """
import os, pathlib, signal, sys, time
end, may_stop = map(pathlib.Path, sys.argv[1:])
def await_file(path):
    while not path.exists():
        time.sleep(0.02)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(await_file(may_stop)))
print("rank {RANK} of {WORLD_SIZE} runs".format(**os.environ), flush=True)
await_file(end)
"""


@pytest.mark.parametrize(
    ("options", "hosts", "after"),
    [(("--nnodes", "2:3"), "node0,node1,node2", "node0,node2"), (("--nnodes", "2", "--hosts", "a,b,c"), "a,b", "a,c")],
)
def test_a_node_that_is_lost_while_workers_end_before_the_next_rendezvous_is_not_waited_for(
    job: Job, tmp_path: Path, options: tuple[str, ...], hosts: str, after: str
) -> None:
    """The node that serves the next rendezvous joins it once its workers have ended."""
    program, may_stop = tmp_path / "tidies_up.py", tmp_path / "may_stop"
    program.write_text(TIDIES_UP)
    job.start(*options, "--rdzv-conf", "join_timeout=20", program=program, arguments=(may_stop,))
    job.wait_for_world(hosts.count(",") + 1, hosts)
    first, second, *_ = job.agents()
    os.kill(member(first), signal.SIGKILL)
    job.running.wait_for("the nodes start a new one")
    os.kill(second, signal.SIGKILL)
    job.running.wait_for("was killed by SIGKILL; the job can go on without it")
    may_stop.touch()
    job.wait_for_world(2, after)
    job.end()
    finished = job.running.finish()
    assert finished.returncode == 0, finished.err


@contextlib.contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Stand still in the meantime."""
    held = list(pids)
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in held:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def member(agent: int) -> int:
    return next(pid for pid in children(agent) if command_line(pid).startswith("ddplaunch member"))


def forkserver(agent: int) -> int:
    return wait_until(lambda: [pid for pid in children(agent) if "forkserver" in command_line(pid)])[0]


@pytest.mark.usefixtures("slow_import")
def test_the_rendezvous_moves_while_nodes_are_on_their_way_to_it(job: Job) -> None:
    job.start("--verbose", "--nnodes", "2:3")
    wait_until(lambda: len(job.agents()) == 3)
    first, *others = job.agents()
    with stopped(map(forkserver, others)):
        job.running.wait_for("waiting at .* for 2 more nodes; here: node0")
        os.kill(first, signal.SIGKILL)
        job.running.wait_for("the agent on node0 was killed by SIGKILL; the job can go on without it")
    job.wait_for_world(2, "node1,node2")
    job.end()
    finished = job.running.finish()
    assert finished.returncode == 0, finished.err
    assert "has lost the rendezvous" not in finished.err


@pytest.mark.usefixtures("slow_import")
def test_a_node_is_lost_while_the_rendezvous_is_being_opened(job: Job) -> None:
    job.start("--nnodes", "2:3")
    wait_until(lambda: len(job.agents()) == 3)
    first, *_, last = job.agents()
    with stopped([forkserver(first)]):
        job.running.wait_for("workers on 3 nodes")
        os.kill(last, signal.SIGKILL)
        job.running.wait_for("the agent on node2 was killed by SIGKILL; the job can go on without it")
    job.wait_for_world(2, "node0,node1")
    job.end()
    assert job.running.finish().returncode == 0


@pytest.mark.usefixtures("slow_import")
def test_an_agent_that_is_told_to_end_before_the_nodes_have_met_ends_the_run(job: Job) -> None:
    job.start("--nnodes", "2")
    wait_until(lambda: len(job.agents()) == 2)
    first, second = job.agents()
    with stopped([forkserver(first)]):
        job.running.wait_for("workers on 2 nodes")
        os.kill(second, signal.SIGTERM)
        job.running.wait_for("another process sent SIGTERM to the agent on node1")
        finished = job.running.finish()
    assert finished.returncode == NODE_LOST


def test_one_agent_that_is_told_to_end_ends_the_run_and_no_rank_is_blamed(job: Job) -> None:
    job.start("--nnodes", "2")
    job.wait_for_world(2, "node0,node1")
    os.kill(job.agents()[1], signal.SIGTERM)
    finished = job.running.finish()
    assert finished.returncode == NODE_LOST
    assert "stopped, another process sent SIGTERM to the agent on node1" in finished.err
    assert (finished.report["outcome"], finished.report["first_failure"]) == ("stopped", None)


def test_a_rendezvous_that_is_lost_while_the_run_is_stopped_changes_nothing(job: Job, tmp_path: Path) -> None:
    # Workers that have a handler for the signals and go on.
    slow = tmp_path / "slow.py"
    handlers = "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda *_: None)"
    slow.write_text(f"import runpy, signal\n{handlers}\nrunpy.run_path({str(ROUNDS)!r}, run_name='__main__')\n")
    job.start("--nnodes", "2", program=slow)
    job.wait_for_world(2, "node0,node1")
    job.running.signal(signal.SIGINT)
    job.running.wait_for("SIGINT: stopping the workers")
    os.kill(member(job.agents()[0]), signal.SIGKILL)
    job.end()
    finished = job.running.finish()
    assert finished.returncode == 128 + signal.SIGINT, finished.err


@pytest.mark.slow
def test_a_silent_member_does_not_keep_nodes_from_meeting_again_and_one_of_a_lost_node_is_not_missed(job: Job) -> None:
    """The heartbeats of a lost node end first: were they missed, that would be a restart before the one for node2."""
    job.start("--nnodes", "2:3")
    job.wait_for_world(3, "node0,node1,node2")
    os.kill(job.agents()[1], signal.SIGKILL)
    job.wait_for_world(2, "node0,node2")
    os.kill(member(job.agents()[1]), signal.SIGSTOP)
    # On a busy machine node2's agent, whose member does not answer for 7 s, may be the first to notice.
    reason = "it sent no heartbeat for 8 s|.* for 10 s"
    text = rf"node2 has lost the rendezvous on node0 \(({reason})\); the nodes start a new one"
    job.running.wait_for(text)
    job.running.wait_for(r"rank \d of 2 in round 2", 2)
    job.end()
    finished = job.running.finish()
    assert finished.returncode == 0, finished.err
    assert [attempt["attempt_follows"] for attempt in finished.report["attempts"]] == [True, True, False]
