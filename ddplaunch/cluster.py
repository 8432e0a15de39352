"""Did a scheduler start ddplaunch, once per node or once per worker? The environment -> ``Detected``, by one table.

Pure. Says what the environment says; what the user says with options wins, and the caller sees to that. The innermost
launcher counts: mpirun inside a SLURM job shadows SLURM, and SLURM's step its job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ddplaunch import slurm
from ddplaunch.detected import Detected, candidate_ports
from ddplaunch.errors import UsageError
from ddplaunch.host_ranges import fold
from ddplaunch.hosts import Host, parse_entry
from ddplaunch.printable import shown
from ddplaunch.task import Task

_LOOPBACK = "127.0.0.1"


def _slurm_step(environ: Mapping[str, str]) -> Detected | None:
    step = slurm.read_step(environ)
    if step is None:
        return None
    nodes, per_node = len(step.hosts), step.tasks_per_node
    token = f"slurm-{step.job_id}.{step.step_id}.{step.restarts}"
    where = f"SLURM job {step.job_id}, step {step.step_id}: node {step.node_id} of {nodes} ({_folded(step.hosts)})"
    task = Task(step.rank, step.local_rank, sum(per_node), per_node[step.node_id], step.node_id, per_node)
    is_task = max(per_node) > 1
    return Detected(
        name="SLURM",
        kind="task" if is_task else "node",
        description=f"{where}, rank {step.rank} of {sum(per_node)}" if is_task else where,
        index=step.rank,
        agents=sum(per_node),
        hosts=tuple(map(Host, step.hosts)),
        first_host=_LOOPBACK if nodes == 1 else step.hosts[0],
        ports=(*step.reserved_ports[:8], *candidate_ports(token))[:8],
        token=token,
        serves=step.node_id == step.local_rank == 0,
        task=task if is_task else None,
        warnings=tuple(slurm.lint(environ, step)),
    )


def _slurm_allocation(environ: Mapping[str, str]) -> Detected | None:
    job = slurm.read_allocation(environ)
    if job is None:
        return None
    return Detected(
        name="SLURM",
        kind="allocation",
        description=f"SLURM job {job.job_id}: {len(job.hosts)} nodes ({_folded(job.hosts)}), not in a step of srun",
        hosts=tuple(map(Host, job.hosts)),
        warnings=tuple(slurm.lint(environ, None)),
    )


def _mpi(name: str, variables: tuple[str, ...], environ: Mapping[str, str]) -> Detected:
    """A process that an MPI launcher started; ``variables`` are its rank, size, local rank and local size."""
    rank, size, local_rank, local_size = (_number(environ, variable, name) for variable in variables)
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(f"{name}'s variables contradict each other: {_shown(environ, variables)}", slurm.IGNORE)
    by_node = rank % local_size == local_rank
    per_node = () if size % local_size else (local_size,) * (size // local_size)
    task = Task(rank, local_rank, size, local_size, rank // local_size if by_node else None, per_node)
    run = next((environ[id_] for id_ in _MPI_RUN_IDS if environ.get(id_)), "")
    token = re.sub(r"[^A-Za-z0-9_.:@+-]", "-", f"mpi-{run}")[:128] if run else None
    return Detected(
        name=name,
        kind="task" if local_size > 1 else "node",
        description=f"{name}: rank {rank} of {size}, local rank {local_rank} of {local_size}",
        index=rank,
        agents=size,
        first_host=_LOOPBACK if size == local_size else environ.get("MASTER_ADDR") or None,
        ports=_master_port(environ) or (candidate_ports(token) if token else ()),
        token=token,
        serves=rank == 0,
        task=task if local_size > 1 else None,
    )


_MPI_RUN_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")
"""Differ for two mpiruns in one job, unlike the scheduler's job id. MPICH's mpiexec has none."""

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_JSRUN = tuple(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PALS = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _lsf(environ: Mapping[str, str]) -> Detected | None:
    if environ.get("LSF_PM_TASKID", "1") != "1":
        return _copy("LSF", "blaunch")
    text, hostfile = environ.get("LSB_MCPU_HOSTS", ""), environ.get("LSB_DJOB_HOSTFILE")
    if not text and not hostfile:
        return None
    words = text.split()
    if len(words) % 2 or not all(re.fullmatch(r"[0-9]{1,9}", slots) for slots in words[1::2]):
        raise UsageError(f"LSB_MCPU_HOSTS={shown(text)}: not like hostA 4 hostB 4", slurm.IGNORE)
    names = words[::2]
    # Where jsrun is used the list begins with the node of the job script, which has no GPU: batch2 1 h22n07 42.
    if len(names) > 1 and words[1] == "1" and re.match(r"batch|launch|login", names[0]):
        del names[0]
    hosts = tuple(host for name in dict.fromkeys(names) for host in parse_entry(name, "LSB_MCPU_HOSTS"))
    what = f"{len(hosts)} hosts ({_folded(names)})" if hosts else f"hosts in {hostfile}"
    return Detected(
        name="LSF",
        kind="hosts",
        description=f"LSF job {environ['LSB_JOBID']}: {what}, to be reached over ssh",
        hosts=hosts,
        hostfile=None if hosts else hostfile,
    )


def _pbs(environ: Mapping[str, str]) -> Detected:
    if environ.get("PBS_NODENUM", "0") != "0":
        return _copy("PBS", "pbsdsh")
    return Detected(
        name="PBS",
        kind="hosts",
        description=f"PBS job {environ['PBS_JOBID']}: hosts in {environ['PBS_NODEFILE']}, to be reached over ssh",
        hostfile=environ["PBS_NODEFILE"],
    )


def _copy(name: str, starter: str) -> Detected:
    """One of several that ``starter`` started: it must not start the whole job once more over ssh."""
    warning = (
        f"{starter} started ddplaunch on this node, and tells it nothing of the others: start it once, in the job "
        "script, or on every node with --nnodes, --node-rank and --rdzv-endpoint"
    )
    return Detected(name=name, kind="node", description=f"{name}: started by {starter}", warnings=(warning,))


def _kubernetes(environ: Mapping[str, str]) -> Detected:
    index = _number(environ, "JOB_COMPLETION_INDEX", "Kubernetes")
    return Detected(
        name="Kubernetes",
        kind="node",
        description=f"Kubernetes indexed job: index {index}",
        index=index,
        first_host=environ.get("MASTER_ADDR") or None,
        ports=_master_port(environ),
        serves=index == 0,
    )


@dataclass(frozen=True)
class Row:
    """One way to be started: how it is recognised, and what it gives.

    Attributes:
        word: how ``--cluster`` names it.
        marks: recognised where all of these variables are set.
        read: None where the marks deceive.
    """

    word: str
    name: str
    marks: tuple[str, ...]
    read: Callable[[Mapping[str, str]], Detected | None]


def _mpi_row(word: str, name: str, variables: tuple[str, ...], *more_marks: str) -> Row:
    return Row(word, name, (variables[0], *more_marks), lambda environ: _mpi(name, variables, environ))


TABLE = (
    _mpi_row("openmpi", "Open MPI", _OPEN_MPI),
    _mpi_row("jsrun", "jsrun", _JSRUN),
    _mpi_row("pals", "PALS", _PALS),
    # srun --mpi=pmi2 sets PMI_RANK too.
    _mpi_row("mpich", "MPICH, Intel MPI", _MPICH, "MPI_LOCALRANKID"),
    Row("slurm", "SLURM, srun", ("SLURM_STEP_NODELIST",), _slurm_step),
    Row("slurm", "SLURM, sbatch or salloc", ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"), _slurm_allocation),
    Row("lsf", "LSF", ("LSB_JOBID",), _lsf),
    Row("pbs", "PBS", ("PBS_JOBID", "PBS_NODEFILE"), _pbs),
    Row("kubernetes", "Kubernetes indexed job", ("JOB_COMPLETION_INDEX",), _kubernetes),
)
"""In the order in which they are asked; the first that answers counts."""

WORDS = ("auto", *dict.fromkeys(row.word for row in TABLE), "none")
"""What ``--cluster`` may say."""


def detect(environ: Mapping[str, str], cluster: str = "auto") -> Detected | None:
    """What started ddplaunch; None where nothing did that says so, or ``cluster`` is ``none``.

    Raises:
        UsageError: variables that cannot be read or contradict each other, or no trace of the named cluster.
    """
    if cluster not in WORDS:
        raise UsageError(f"--cluster {shown(cluster)}: must be one of {', '.join(WORDS)}")
    rows = [row for row in TABLE if cluster in ("auto", row.word)]
    for row in rows:
        found = row.read(environ) if all(environ.get(mark) for mark in row.marks) else None
        if found is not None:
            return found
    if rows and cluster != "auto":
        marks = " or ".join(" and ".join(row.marks) for row in rows)
        raise UsageError(f"--cluster {cluster}: it did not start ddplaunch, or {marks} would be set")
    return None


def _master_port(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get("MASTER_PORT", "")
    return (int(text),) if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 65536 else ()


def _number(environ: Mapping[str, str], variable: str, name: str) -> int:
    text = environ.get(variable, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        said = f"{variable}={shown(text)} is not a whole number" if text else f"{variable} is not set"
        raise UsageError(f"{name} started ddplaunch, but {said}", slurm.IGNORE)
    return int(text)


def _shown(environ: Mapping[str, str], variables: Iterable[str]) -> str:
    return ", ".join(f"{variable}={environ[variable]}" for variable in variables)


def _folded(names: Iterable[str]) -> str:
    return shown(fold(names), 60)
