"""What a worker group reports of its workers."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ddplaunch.agent.workers.worker_group import WorkerGroup
from ddplaunch.cluster.scheduled import ScheduledTask
from ddplaunch.system import procfs
from tests.support.configs import a_round, agent_spec
from tests.support.processes import wait_until

ROUND = a_round(node_rank=2, nnodes=3, first_rank=8, world_size=9)
TASK = ScheduledTask(rank=8, local_rank=3, world_size=9, local_world_size=5, node_rank=1, tasks_per_node=(4, 5))


@pytest.mark.parametrize(("task", "node_rank", "local_rank"), [(None, 2, 0), (TASK, 1, 3)])
def test_an_exit_has_the_ranks_that_the_worker_had(task: ScheduledTask | None, node_rank: int, local_rank: int) -> None:
    """Of an agent for one worker only, the scheduler's ranks count, as in the worker's environment."""
    group = WorkerGroup(agent_spec(task=task), ROUND, outbox=None)  # type: ignore[arg-type]
    group.workers[0].pid, group.workers[0].returncode = 4242, 0
    (exit_,) = group.finish(0.0, "no", stop_requested=False)
    assert (exit_.rank, exit_.node_rank, exit_.local_rank) == (8, node_rank, local_rank)


@pytest.mark.parametrize(
    ("code", "by_itself"), [("import os; os._exit(3)", True), ("import time; time.sleep(60)", False)]
)
def test_a_worker_that_was_ending_when_it_was_stopped_has_ended_by_itself(code: str, by_itself: bool) -> None:
    """Its peers fail as soon as its sockets are closed, and may be reaped before it."""
    group = WorkerGroup(agent_spec(), ROUND, outbox=None)  # type: ignore[arg-type]
    (worker,) = group.workers
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as child:
        worker.pid = child.pid
        if by_itself:
            wait_until(lambda: procfs.is_ending(child.pid))
        group.stop(signal.SIGTERM)
        worker.returncode = child.wait()
    (exit_,) = group.finish(0.0, "no", stop_requested=False)
    assert (exit_.returncode, exit_.stopped) == ((3, False) if by_itself else (-signal.SIGTERM, True))
