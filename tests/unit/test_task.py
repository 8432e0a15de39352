"""A worker that a scheduler started by itself gets its own place in the job, though its agent has but this one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from ddplaunch.agent.workers.start_plan import Placement, place_workers
from ddplaunch.cluster.job import ScheduledTask
from ddplaunch.config import LaunchConfig, WorkerConfig
from ddplaunch.errors import UsageError
from ddplaunch.protocol import environment, wire
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.transport import srun
from tests.support.configs import a_round
from tests.unit.test_environment_of_workers import SPEC

TASK = ScheduledTask(rank=6, local_rank=2, world_size=12, local_world_size=4, node_rank=1, tasks_per_node=(4, 4, 4))
OF_TASK = replace(SPEC, workers=WorkerConfig(nproc_per_node=1), task=TASK)
ROUND = a_round(node_rank=6, nnodes=12, first_rank=6, world_size=12)


def placed(visible: str, **fields: Any) -> Placement:
    return place_workers(
        replace(OF_TASK, workers=replace(OF_TASK.workers, **fields)), {"CUDA_VISIBLE_DEVICES": visible}
    )


def test_the_workers_environment_is_the_tasks():
    worker = environment.worker_environ({}, OF_TASK, ROUND, 0, "")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
    assert [worker[name] for name in names] == ["6", "2", "12", "4", "1", "3", "6"]
    alone = environment.worker_environ(
        {}, replace(OF_TASK, workers=WorkerConfig(virtual_local_rank=True)), ROUND, 0, ""
    )
    assert (alone["LOCAL_RANK"], alone["RANK"]) == ("0", "6")


def test_the_record_survives_the_wire():
    assert wire.decode(wire.encode(OF_TASK), (AgentSpec,)) == OF_TASK


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


def test_a_step_of_ours_inherits_nothing_of_how_the_job_counts_tasks():
    inherited = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2", "SLURM_CPU_BIND": "x", "SLURM_NTASKS": "9", "A": "b"}
    assert srun.environment(inherited) == {"SLURM_JOB_ID": "7", "A": "b"}
    assert srun.SrunTransport.command(LaunchConfig(script="x.py"), "node7")[:2] == ("srun", "--nodelist=node7")
