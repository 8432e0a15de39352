"""The environment a worker gets on top of what its node's agent inherited: one table, as torchrun's.

Pure. README's environment table is generated from ``NAMES`` by a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.model import AgentSpec, Round

RUN_ID = "DDPLAUNCH_RUN_ID"
"""Carried by every process of a run, so that a sweep finds what left its process group and its parent."""

NAMES: dict[str, str] = {
    "RANK": "number of the worker in the job, 0 to WORLD_SIZE - 1; contiguous on a node",
    "LOCAL_RANK": "number of the worker on its node; always 0 with --virtual-local-rank",
    "WORLD_SIZE": "workers of the job",
    "LOCAL_WORLD_SIZE": "workers of the node",
    "GROUP_RANK": "number of the node",
    "GROUP_WORLD_SIZE": "nodes of the job",
    "ROLE_NAME": "--role, `default` if not given",
    "ROLE_RANK": "as RANK",
    "ROLE_WORLD_SIZE": "as WORLD_SIZE",
    "MASTER_ADDR": "where the workers' c10d store listens; 127.0.0.1 on one node unless --master-addr says otherwise",
    "MASTER_PORT": "its port, fresh for every attempt unless --master-port fixes it",
    "TORCHELASTIC_RESTART_COUNT": "0 for the first attempt, the same on all nodes",
    "TORCHELASTIC_MAX_RESTARTS": "--max-restarts",
    "TORCHELASTIC_RUN_ID": "the run's id (--rdzv-id, or a fresh one)",
    "TORCHELASTIC_USE_AGENT_STORE": "True: the store is there before the workers start",
    "TORCHELASTIC_ERROR_FILE": "where the worker's exception is recorded; empty with --log-dir /dev/null",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1 unless set",
    "OMP_NUM_THREADS": "CPUs the node may use / workers (at least 1) unless set; not set for a lone worker",
    "CUDA_VISIBLE_DEVICES": "inherited; set by --gpus, --gpus-per-proc and --virtual-local-rank",
    "GLOO_SOCKET_IFNAME": "with several nodes: the interface by which they reach each other, unless set",
    "NCCL_SOCKET_IFNAME": "the same with --interface or --local-addr, unless set",
    RUN_ID: "the run's id; a sweep finds what is left of a run by it",
}


def shared_environ(inherited: Mapping[str, str], run_id: str, local_world_size: int, cpus: int) -> dict[str, str]:
    """What all workers of a node share, fixed before any library loads: the forkserver starts with it.

    ``cpus`` is how many CPUs the node's affinity allows.
    """
    env = dict(inherited)
    env[RUN_ID] = run_id
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, cpus // local_world_size)))
    return env


def worker_environ(
    shared: Mapping[str, str],
    spec: AgentSpec,
    round_: Round,
    local_rank: int,
    error_file: str,
) -> dict[str, str]:
    """The complete environment of one worker but for its devices."""
    rank = round_.first_rank + local_rank
    env = dict(shared)
    env.update(
        RANK=str(rank),
        LOCAL_RANK="0" if spec.virtual_local_rank else str(local_rank),
        WORLD_SIZE=str(round_.world_size),
        LOCAL_WORLD_SIZE=str(round_.local_world_size),
        GROUP_RANK=str(round_.node_rank),
        GROUP_WORLD_SIZE=str(round_.nnodes),
        ROLE_NAME=spec.role,
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(round_.world_size),
        MASTER_ADDR=round_.master_addr,
        MASTER_PORT=str(round_.master_port),
        TORCHELASTIC_RESTART_COUNT=str(round_.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(spec.max_restarts),
        TORCHELASTIC_RUN_ID=spec.run_id,
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_ERROR_FILE=error_file,
    )
    if spec.task:
        env.update({**spec.task.environ(), **({"LOCAL_RANK": "0"} if spec.virtual_local_rank else {})})
    return env
