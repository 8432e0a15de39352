"""Environment variables of a worker, in addition to those of its agent; most are torchrun's, with its meaning.

Used by the agent and by --plan. Pure. A variable that scripts see has a row of ``NAMES``: --plan shows these names, a
test compares the environment table of the docs with them, and ``-x`` refuses those that are not in
``MAY_BE_INHERITED``, and shows their meaning.
docs/architecture.md ("Where do I add a variable of the workers?") has the list of steps for a new one.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddplaunch.protocol import script_request

if TYPE_CHECKING:
    from ddplaunch.protocol.results import Round
    from ddplaunch.protocol.specs import AgentSpec

RUN_ID = "DDPLAUNCH_RUN_ID"
"""Holds the node tag in every process of a run, so that a sweep finds one that left its process group, too."""

TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"

CHECKPOINT = "DDPLAUNCH_CHECKPOINT"
"""Of a worker that starts a run, it is none of that run's workers."""

SECRET = "DDPLAUNCH_SECRET"
"""Read by the launcher: the secret of a rendezvous of nodes that were started by hand. Workers do not get it."""

FLIGHT_RECORD_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Two names of one setting of torch: the path, without the rank at its end, to which it writes a flight record when a
collective fails or times out. Older versions know only the second."""

FLIGHT_RECORD_FILE = "flight_record_rank_"
"""Begin of the name of that file in the worker's folder; torch appends the rank."""

NAMES: dict[str, str] = {
    "RANK": "number of the worker in the job, 0 to WORLD_SIZE - 1; contiguous on a node",
    "LOCAL_RANK": "number of the worker on its node; always 0 with --virtual-local-rank",
    "WORLD_SIZE": "workers of the job: --nnodes and --nproc-per-node",
    "LOCAL_WORLD_SIZE": "workers of the node: --nproc-per-node",
    "GROUP_RANK": "number of the node",
    "GROUP_WORLD_SIZE": "nodes of the job",
    "ROLE_NAME": "--role; `default` if not given",
    "ROLE_RANK": "equal to RANK",
    "ROLE_WORLD_SIZE": "equal to WORLD_SIZE",
    "MASTER_ADDR": "address of the workers' c10d store; 127.0.0.1 on one node unless --master-addr is given",
    "MASTER_PORT": "port of the workers' c10d store; new for every attempt; on one node, --master-port fixes it",
    "TORCHELASTIC_RESTART_COUNT": "number of restarts before this attempt; equal on all nodes",
    "TORCHELASTIC_MAX_RESTARTS": "--max-restarts",
    TORCHELASTIC_RUN_ID: "run id: --rdzv-id, or a new one; equal on all nodes",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "--signals-to-handle, and the signals of --requeue-on",
    "TORCHELASTIC_USE_AGENT_STORE": "True: the store listens before the workers start; not set for a job's only worker",
    "TORCHELASTIC_ERROR_FILE": "file to which the worker's exception is written; empty with --log-dir /dev/null",
    script_request.VARIABLE: "file in which the script may ask for no restart, or for a restart without this node",
    CHECKPOINT: "with --checkpoint: the newest whole checkpoint before this attempt; empty: there is none",
    "TORCH_FR_DUMP_TEMP_FILE": "with a log folder: begin of the name of torch's flight record, unless set",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "as TORCH_FR_DUMP_TEMP_FILE, for older versions of torch",
    "OMP_NUM_THREADS": "CPUs that the node may use / its workers, at least 1, unless set; not set for a single worker",
    "TORCHINDUCTOR_CACHE_DIR": "a folder on the node's disk for what torch.compile compiles, unless set",
    "TRITON_CACHE_DIR": "the same for Triton, unless this, TRITON_HOME or TORCHINDUCTOR_CACHE_DIR is set",
    "TORCHINDUCTOR_COMPILE_THREADS": "as OMP_NUM_THREADS, but at most 32: processes with which a worker compiles",
    "CUDA_VISIBLE_DEVICES": "inherited; set by --gpus, --gpus-per-proc, --virtual-local-rank; AMD: HIP_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME": "with several nodes: the network interface between them, unless set",
    "NCCL_SOCKET_IFNAME": "with --interface or --local-addr that one; else those that lead to other nodes; unless set",
    "NCCL_RAS_ADDR": "with GPUs of NVIDIA: 127.0.0.1 and a port of this run, unless set or NCCL_RAS_ENABLE is 0",
    "RES_OPTIONS": "`timeout:1 attempts:1` if no name server answers for the address in MASTER_ADDR, unless set",
    RUN_ID: "identifies the processes of the run on this node: run tag and, with several nodes, the node's number",
}

MAY_BE_INHERITED = (
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", *FLIGHT_RECORD_NAMES),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ADDR", "RES_OPTIONS"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"),
)
"""Those of ``NAMES`` whose value the user may choose; ``-x`` refuses the others."""

SET_BEFORE_IMPORTS = (
    "OMP_NUM_THREADS",
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"),
)
"""Those that ``shared_environ``, or the ``environ`` of a feature, may set, and that an import of torch may read.

They may depend on the number of workers, which the launcher does not know. So what has imported torch for a later run
gets them from the agent that leaves it (``features.warm``), and the forkserver of that run compares them.
"""


def shared_environ(inherited: Mapping[str, str], node_tag: str, local_world_size: int, cpus: int) -> dict[str, str]:
    """The variables that are equal for all workers of a node; the forkserver starts with them, before any import.

    ``cpus`` is the number of CPUs that the affinity allows.
    """
    env = {name: value for name, value in inherited.items() if name not in (SECRET, CHECKPOINT)}
    env[RUN_ID] = node_tag
    if local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, cpus // local_world_size)))
    return env


def worker_environ(
    shared: Mapping[str, str],
    spec: AgentSpec,
    round_: Round,
    local_rank: int,
    error_file: str,
    request_file: str = "",
) -> dict[str, str]:
    """The environment of one worker, complete but for the variable of its devices, and those of features.

    ``error_file`` is a path in the worker's folder; empty without one. ``request_file`` is there too, or in memory.
    """
    rank = round_.first_rank + local_rank
    env = dict(shared)
    env.update(
        RANK=str(rank),
        LOCAL_RANK="0" if spec.workers.virtual_local_rank else str(local_rank),
        WORLD_SIZE=str(round_.world_size),
        LOCAL_WORLD_SIZE=str(round_.local_world_size),
        GROUP_RANK=str(round_.node_rank),
        GROUP_WORLD_SIZE=str(round_.nnodes),
        ROLE_NAME=spec.workers.role,
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(round_.world_size),
        MASTER_ADDR=round_.master_addr,
        MASTER_PORT=str(round_.master_port),
        TORCHELASTIC_RESTART_COUNT=str(round_.restart_count),
        TORCHELASTIC_MAX_RESTARTS=str(spec.max_restarts),
        TORCHELASTIC_RUN_ID=spec.run_id,
        TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(spec.signals),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_ERROR_FILE=error_file,
        DDPLAUNCH_REQUEST_FILE=request_file,
    )
    if not round_.has_store:
        del env["TORCHELASTIC_USE_AGENT_STORE"]
    if error_file and not any(name in env for name in FLIGHT_RECORD_NAMES):
        path = os.path.join(os.path.dirname(error_file), FLIGHT_RECORD_FILE)
        env.update(dict.fromkeys(FLIGHT_RECORD_NAMES, path))
    if spec.task:
        env.update({**spec.task.environ(), **({"LOCAL_RANK": "0"} if spec.workers.virtual_local_rank else {})})
    return env
