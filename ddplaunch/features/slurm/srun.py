"""SrunTransport: starts agents on the nodes of a SLURM allocation; each srun is a child process of the launcher.

Runs in the launcher.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.features.remote.command_handle import CommandTransport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import LaunchConfig

_OPTIONS = (
    *("--nodes=1", "--ntasks=1", "--overlap", "--export=ALL", "--input=0", "--mpi=none", "--cpu-bind=none", "--mem=0"),
    *("--kill-on-bad-exit=0", "--job-name=ddplaunch"),
)

_JOB_OPTIONS = (
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_TASKS_PER_NODE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND", "SLURM_CPUS_PER_GPU"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"),
    *(
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_DISTRIBUTION",
        "SLURM_EXACT",
        "SLURM_EXCLUSIVE",
    ),
    *("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_LABELIO", "SLURM_UNBUFFEREDIO"),
    *("SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_HINT"),
)
"""Variables that srun reads as options. Without them a step of one task gets all of the job's resources on its node.

slurmstepd sets those of the binding, to describe that of a task."""


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` without the variables that would change such an srun."""
    return {name: value for name, value in inherited.items() if name not in _JOB_OPTIONS}


class SrunTransport(CommandTransport):
    """Starts agents through srun, which forwards SIGTERM as SIGKILL."""

    missing_hint = (
        "It starts the agents on the nodes of SLURM's allocation. `--cluster none` runs on this machine only."
    )

    @staticmethod
    def carrier(_config: LaunchConfig, host: Host) -> tuple[str, ...]:
        """A step of one task on ``host``, beside the other steps of the job."""
        return ("srun", f"--nodelist={host.name}", *_OPTIONS)

    def environment(self) -> dict[str, str]:
        """Variables of srun, which the agent inherits."""
        return environment({**os.environ, **dict(self._config.remote.environ)})
