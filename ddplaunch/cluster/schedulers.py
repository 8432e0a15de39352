"""The schedulers and MPI launchers that may have started ddplaunch, by one table, and which of them did.

Runs in the launcher, before the configuration is built; a row names its reader, which is imported if the row's
variables are set. The innermost scheduler is used: mpirun inside a SLURM job takes precedence over SLURM, and a step
over its job. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.rows import load
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.cluster.scheduler_readers import SchedulerInfo


@dataclass(frozen=True, kw_only=True)
class SchedulerRow:
    """One way in which a scheduler starts ddplaunch.

    Attributes:
        word: the value of ``--cluster`` that selects it.
        variables: environment variables that are all set where this scheduler started ddplaunch.
        read: ``module:name`` of the function that reads its environment variables into a ``SchedulerInfo``; it returns
            None if they are those of another job, or say too little.
        own: patterns of the names of its variables, which are not forwarded to other machines.
        ranks: variables in which it numbers the processes that it starts with one terminal: only the first of them
            shows a usage error.
        job: variables that identify a job, in one row of each scheduler; the first is set in all of its processes. A
            keeper serves and outlives no other job.
        job_processes: names of the processes that contain a job and end with it. Empty: the outermost process with the
            job's first variable counts as it.
    """

    word: str
    variables: tuple[str, ...]
    read: str
    own: tuple[str, ...]
    ranks: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    job_processes: tuple[str, ...] = ()


_READERS = "ddplaunch.cluster.scheduler_readers"

TABLE = (
    SchedulerRow(
        word="openmpi",
        variables=("OMPI_COMM_WORLD_RANK",),
        read=f"{_READERS}:open_mpi",
        own=("OMPI_*", "PMIX_*", "PRTE_*"),
        ranks=("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    ),
    SchedulerRow(
        word="jsrun",
        variables=("JSM_NAMESPACE_RANK",),
        read=f"{_READERS}:jsrun",
        own=("JSM_*",),
        ranks=("JSM_NAMESPACE_RANK",),
    ),
    SchedulerRow(
        word="pals",
        variables=("PALS_RANKID",),
        read=f"{_READERS}:pals",
        own=("PALS_*",),
        ranks=("PALS_RANKID",),
    ),
    SchedulerRow(
        word="mpich",
        variables=("PMI_RANK", "MPI_LOCALRANKID"),  # srun --mpi=pmi2 sets PMI_RANK too.
        read=f"{_READERS}:mpich",
        own=("PMI_*",),
        ranks=("PMI_RANK",),
    ),
    SchedulerRow(
        word="slurm",
        variables=("SLURM_STEP_NODELIST",),
        read=f"{_READERS}:slurm_step",
        own=("SLURM*", "SBATCH_*", "SRUN_*"),
        ranks=("SLURM_PROCID",),
    ),
    SchedulerRow(
        word="slurm",
        variables=("SLURM_JOB_ID", "SLURM_JOB_NODELIST"),
        read=f"{_READERS}:slurm_allocation",
        own=("SLURM*", "SBATCH_*", "SRUN_*"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        job_processes=("slurmstepd", "salloc"),
    ),
    SchedulerRow(
        word="lsf", variables=("LSB_JOBID",), read=f"{_READERS}:lsf", own=("LSB_*",), job=("LSB_JOBID", "LSB_JOBINDEX")
    ),
    SchedulerRow(
        word="pbs", variables=("PBS_JOBID", "PBS_NODEFILE"), read=f"{_READERS}:pbs", own=("PBS_*",), job=("PBS_JOBID",)
    ),
    SchedulerRow(
        word="kubernetes",
        variables=("JOB_COMPLETION_INDEX",),
        read=f"{_READERS}:kubernetes",
        own=("JOB_COMPLETION_INDEX",),
    ),
)
"""The rows are tried in this order; the first that applies is used."""

WORDS = ("auto", "none", *dict.fromkeys(row.word for row in TABLE))
"""Values of ``--cluster``."""

OWN = tuple(dict.fromkeys(pattern for row in TABLE for pattern in row.own))
"""Patterns of the names of all schedulers' variables."""


def detect(environ: Mapping[str, str], cluster: str = "auto") -> SchedulerInfo | None:
    """The scheduler that started ddplaunch; None without one, or if ``cluster`` is ``none``.

    Args:
        environ: the environment of this process.
        cluster: one of ``WORDS``.

    Raises:
        UsageError: variables are invalid or contradict each other, or those of the selected scheduler are not set.
    """
    if cluster not in WORDS:
        raise UsageError(f"--cluster {quote(cluster)}: must be one of {', '.join(WORDS)}")
    rows = [row for row in TABLE if cluster in ("auto", row.word)]
    present = [row for row in rows if all(map(environ.get, row.variables))]
    for row in present:
        found: SchedulerInfo | None = load(row.read)(environ)
        if found is not None:
            return found
    if rows and cluster != "auto":
        variables = " or ".join(" and ".join(row.variables) for row in present or rows)
        if present:
            raise UsageError(f"--cluster {cluster}: what belongs to {variables} is not set, or is of another job")
        raise UsageError(f"--cluster {cluster}: it did not start ddplaunch, or {variables} would be set")
    return None


def jobs(environ: Mapping[str, str]) -> tuple[SchedulerRow, ...]:
    """A row of each scheduler that has a job of which this process is a part."""
    return tuple(row for row in TABLE if row.job and environ.get(row.job[0]))


def is_first_task(environ: Mapping[str, str]) -> bool:
    """Whether no scheduler has started this process as a second or later one of one command."""
    return all(environ.get(name, "0") == "0" for row in TABLE for name in row.ranks)
