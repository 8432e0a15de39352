"""The workers' environment, for any place that a worker may have in a job.

A worker that a scheduler started by itself gets its own place in the job, though its agent has but this one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ddplaunch.agent.workers.start_plan import Placement, place_workers
from ddplaunch.cluster.scheduled import ScheduledTask
from ddplaunch.config import WorkerConfig
from ddplaunch.errors import UsageError
from ddplaunch.protocol import environment
from ddplaunch.protocol.results import Round
from ddplaunch.protocol.specs import AgentSpec
from tests.support import golden
from tests.support.configs import NOT_ALWAYS_SET, a_round, agent_spec

SPEC = agent_spec(
    run_id="job7",
    host="node2",
    workers=WorkerConfig(nproc_per_node=2, role="trainer"),
    max_restarts=3,
    signals=("SIGTERM", "SIGUSR2"),
)
VIRTUAL = replace(SPEC, workers=WorkerConfig(virtual_local_rank=True))
ROUND = a_round(
    attempt=5,
    restart_count=2,
    node_rank=1,
    nnodes=3,
    first_rank=4,
    local_world_size=2,
    world_size=7,
    master_addr="10.0.0.2",
)
TASK = ScheduledTask(rank=6, local_rank=2, world_size=12, local_world_size=4, node_rank=1, tasks_per_node=(4, 4, 4))
OF_TASK = replace(SPEC, workers=WorkerConfig(), task=TASK)
ROUND_OF_TASK = a_round(node_rank=6, nnodes=12, first_rank=6, world_size=12)
STALE = dict.fromkeys(environment.NAMES.keys() - set(environment.MAY_BE_INHERITED), "stale")
OF_USER = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES")


def environ(
    inherited: Mapping[str, str],
    local_rank: int = 1,
    folder: str = "/logs/1",
    *,
    spec: AgentSpec = SPEC,
    round_: Round = ROUND,
    has_store: bool = True,
) -> dict[str, str]:
    """Of a worker on the second of three nodes. Nothing that is given is changed."""
    before = dict(inherited)
    shared = environment.shared_environ(inherited, "job7", 2, 16)
    files = [f"{folder}/{name}" if folder else "" for name in ("error.json", "request.txt")]
    worker = environment.worker_environ(shared, spec, replace(round_, has_store=has_store), local_rank, *files)
    assert inherited == before
    assert shared == environment.shared_environ(inherited, "job7", 2, 16)
    return worker


def test_the_environment_of_a_worker() -> None:
    """torchrun: agent_api_test 1; local_elastic_agent_test 4, 12.

    Not TORCH_NCCL_ASYNC_ERROR_HANDLING, whose default writes the flight record; torchrun's 1 aborts before that. The
    secret of the rendezvous is not passed on, and what a surrounding job has left has no effect.
    """
    worker = environ({"HOME": "/home/u", environment.SECRET: "x" * 16, **STALE})
    others = {
        "the first of the node": environ({}, local_rank=0),
        "with a virtual local rank": environ({}, spec=VIRTUAL),
        "of a scheduler's task": environ({}, 0, spec=OF_TASK, round_=ROUND_OF_TASK),
        "of a task, with a virtual local rank": environ({}, 0, spec=replace(VIRTUAL, task=TASK), round_=ROUND_OF_TASK),
        "without a store": environ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, has_store=False),
        "without a log folder": environ({}, folder=""),
        **{f"with values of the user, {value!r}": environ(dict.fromkeys(OF_USER, value)) for value in ("1,2", "")},
        **{f"with its own {name}": environ({name: "/mine/trace_"}) for name in environment.FLIGHT_RECORD_NAMES},
    }
    pages = {"the second of the node": sorted(worker.items())}
    for name, env in others.items():  # What differs.
        gone = [(each, "(not set)") for each in worker.keys() - env.keys() - {"HOME"}]
        pages[name] = sorted([*(env.items() - worker.items()), *gone])
    golden.check("environments", {name: "\n".join(map("=".join, lines)) for name, lines in pages.items()})
    # Set by whoever knows the devices.
    of_features = {*environment.SET_BEFORE_IMPORTS} - {"OMP_NUM_THREADS"}
    assert environment.NAMES.keys() - NOT_ALWAYS_SET - of_features == {*worker, "CUDA_VISIBLE_DEVICES"} - {"HOME"}
    assert all(environment.NAMES.values())


@pytest.mark.features
def test_the_variables_that_imports_may_read_are_listed_for_what_imports_ahead():
    """So that a new one needs no change in what keeps an import for the next run."""
    set_ = place_workers(SPEC, {"HOME": "/home/u"}).shared_environ.keys() - {"HOME", environment.RUN_ID}
    assert set_ == {*environment.SET_BEFORE_IMPORTS}


def test_the_cpus_are_shared_out() -> None:
    def threads(question: str) -> str | None:
        workers, cpus = map(int, re.findall(r"\d+", question))
        return environment.shared_environ({}, "job", workers, cpus).get("OMP_NUM_THREADS")

    golden.check_answers("threads_of_workers", threads)


@pytest.mark.parametrize(
    ("visible", "fields", "devices"),
    [
        (None, {"nproc_per_node": 2}, (None, 2)),
        ("0,1,2,3", {}, (None, 4)),
        ("", {}, (None, 1)),
        (None, {"nproc_per_node": 2, "virtual_local_rank": True}, ((("0",), ("1",)), 2)),
    ],
)
def test_devices_are_assigned_only_where_an_option_asks_for_it(
    visible: str | None, fields: dict[str, Any], devices: tuple[Any, int]
) -> None:
    """Options that name or share out devices: tests/process/test_environment.py."""
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    placement = place_workers(replace(SPEC, workers=WorkerConfig(**fields)), inherited)
    assert (placement.devices, placement.local_world_size) == devices


# A worker that a scheduler started by itself: slurm/test_srun.py and ssh/test_mpi.py have real ones.


def placed(visible: str, **fields: Any) -> Placement:
    return place_workers(
        replace(OF_TASK, workers=replace(OF_TASK.workers, **fields)), {"CUDA_VISIBLE_DEVICES": visible}
    )


def test_devices_are_the_tasks_share_of_the_node_or_what_the_scheduler_left_it():
    assert placed("4,5,6,7", virtual_local_rank=True).devices == (("6",),)
    assert placed("6", virtual_local_rank=True).devices == (("6",),)
    assert placed("0,1,2,3,4,5,6,7", gpus_per_proc=2).devices == (("4", "5"),)
    assert placed("4,5", gpus_per_proc=2).devices == (("4", "5"),)
    assert placed("0,1,2,3").devices is None
    with pytest.raises(UsageError, match="are needed"):
        placed("0,1", virtual_local_rank=True)


def test_cpus_are_shared_with_the_nodes_other_tasks_unless_the_scheduler_has_dealt_them_out():
    allowed = os.sched_getaffinity(0)
    if len(allowed) == os.cpu_count():
        assert placed("").shared_environ["OMP_NUM_THREADS"] == str(max(1, len(allowed) // 4))
    if len(allowed) > 1:
        os.sched_setaffinity(0, {min(allowed)})
        try:
            assert "OMP_NUM_THREADS" not in placed("").shared_environ
        finally:
            os.sched_setaffinity(0, allowed)
