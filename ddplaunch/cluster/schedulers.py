"""Detects the scheduler or MPI launcher that started ddplaunch: environment -> ``SchedulerInfo``, by one table.

Runs in the launcher, before the configuration is built. The innermost scheduler is used: mpirun inside a SLURM job
takes precedence over SLURM, and a step over its job. Pure, except ``read_hosts``. Must not decide between the
scheduler's facts and the user's options: ``cli.scheduler_options`` does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from ddplaunch.cluster import slurm
from ddplaunch.cluster.hostfile import read_hostfile
from ddplaunch.cluster.hostlist import fold
from ddplaunch.cluster.hosts import Host, parse_entry
from ddplaunch.cluster.task import ScheduledTask
from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import quote

LOOPBACK = "127.0.0.1"

StartKind = Literal["node", "task", "allocation", "hosts"]

PORTS = (16384, 28671)
"""First and last candidate port: below the ports that Linux and Kubernetes assign (from 32768 and 30000) and torchrun's
29400 and 29500, above those of most services."""


@dataclass(frozen=True, kw_only=True)
class SchedulerInfo:
    """The scheduler that started ddplaunch, and the facts that its environment variables hold.

    Attributes:
        name: the scheduler's name, for messages.
        kind: how ddplaunch was started. ``node``: once per node. ``task``: once per worker; this process is for the
            worker ``task``. ``allocation``: once, in an allocation of SLURM; srun reaches ``hosts``. ``hosts``: once;
            ssh reaches ``hosts``.
        description: one line for ``-v``.
        index: this agent's number among ``agents``; None if unknown.
        agents: number of agents in the rendezvous, one per node, or one per worker for a ``task``; None if unknown.
        hosts: the nodes in the scheduler's order, without slots, because schedulers count CPUs, not workers.
        hostfile: path of the file that names the nodes, if the environment does not; ``read_hosts`` reads it.
        first_host: host that serves the rendezvous; None if unknown, see ``missing_endpoint_error``.
        other_addresses: further addresses of the first host, in the order to try.
        ports: candidate ports of the rendezvous, in the order to try; see ``candidate_ports``.
        token: text that is equal in all agents of a run and differs between runs; a valid run id. None if unknown.
        is_server: this agent serves the rendezvous.
        warnings: probable mistakes, one sentence each; ``lint`` includes them.
    """

    name: str
    kind: StartKind
    description: str
    index: int | None = None
    agents: int | None = None
    hosts: tuple[Host, ...] = ()
    hostfile: str | None = None
    first_host: str | None = None
    other_addresses: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    token: str | None = None
    is_server: bool = False
    task: ScheduledTask | None = None
    warnings: tuple[str, ...] = ()


def candidate_ports(token: str, first: int = PORTS[0], last: int = PORTS[1], count: int = 8) -> tuple[int, ...]:
    """Candidate ports of a run's rendezvous, computed from its token: equal on all nodes, in one order.

    The serving node binds the first free port. The other nodes try all ports in turn until a store on one of them has
    the run's token; a store without the token belongs to another run, or its node has not written the token yet.
    """
    ports: dict[int, None] = {}
    for salt in itertools.count():
        if len(ports) >= min(count, last - first + 1):
            break
        import hashlib  # Loads OpenSSL.

        digest = hashlib.sha256(f"{token} {salt}".encode()).digest()
        ports[first + int.from_bytes(digest[:8], "big") % (last - first + 1)] = None
    return tuple(ports)


def read_hosts(scheduler: SchedulerInfo) -> tuple[Host, ...]:
    """The hosts of ``scheduler``, read from its hostfile if it has one; without slots, which count CPUs there.

    Raises:
        UsageError: the hostfile cannot be read.
    """
    if scheduler.hostfile is None:
        return scheduler.hosts
    return tuple(replace(host, slots=None) for host in read_hostfile(scheduler.hostfile))


def _slurm_step(environ: Mapping[str, str]) -> SchedulerInfo | None:
    step = slurm.read_step(environ)
    if step is None:
        return None
    nodes, per_node = len(step.hosts), step.tasks_per_node
    token = f"slurm-{step.job_id}.{step.step_id}.{step.requeue_count}"
    where = f"SLURM job {step.job_id}, step {step.step_id}: node {step.node_id} of {nodes} ({_short(step.hosts)})"
    task = ScheduledTask(step.rank, step.local_rank, sum(per_node), per_node[step.node_id], step.node_id, per_node)
    is_task = max(per_node) > 1
    return SchedulerInfo(
        name="SLURM",
        kind="task" if is_task else "node",
        description=f"{where}, rank {step.rank} of {sum(per_node)}" if is_task else where,
        index=step.rank,
        agents=sum(per_node),
        hosts=tuple(map(Host, step.hosts)),
        first_host=LOOPBACK if nodes == 1 else step.hosts[0],
        ports=(*step.reserved_ports[:8], *candidate_ports(token))[:8],
        token=token,
        is_server=step.node_id == step.local_rank == 0,
        task=task if is_task else None,
        warnings=tuple(slurm.lint(environ, step)),
    )


def _slurm_allocation(environ: Mapping[str, str]) -> SchedulerInfo | None:
    job = slurm.read_allocation(environ)
    if job is None:
        return None
    return SchedulerInfo(
        name="SLURM",
        kind="allocation",
        description=f"SLURM job {job.job_id}: {len(job.hosts)} nodes ({_short(job.hosts)}), not in a step of srun",
        hosts=tuple(map(Host, job.hosts)),
        warnings=tuple(slurm.lint(environ, None)),
    )


def _mpi(name: str, variables: tuple[str, ...], environ: Mapping[str, str]) -> SchedulerInfo:
    """A process of an MPI launcher; ``variables`` are the names of its rank, size, local rank and local size."""
    rank, size, local_rank, local_size = (_number(environ, variable, name) for variable in variables)
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(f"{name}'s variables contradict each other: {_assignments(environ, variables)}", slurm.IGNORE)
    by_node = rank % local_size == local_rank
    per_node = () if size % local_size else (local_size,) * (size // local_size)
    task = ScheduledTask(rank, local_rank, size, local_size, rank // local_size if by_node else None, per_node)
    run = next((environ[id_] for id_ in _MPI_RUN_IDS if environ.get(id_)), "")
    token = _mpi_token(run) if run else None
    return SchedulerInfo(
        name=name,
        kind="task" if local_size > 1 else "node",
        description=f"{name}: rank {rank} of {size}, local rank {local_rank} of {local_size}",
        index=rank,
        agents=size,
        first_host=LOOPBACK if size == local_size else environ.get("MASTER_ADDR") or None,
        ports=_master_port(environ) or (candidate_ports(token) if token else ()),
        token=token,
        is_server=rank == 0,
        task=task if local_size > 1 else None,
    )


def with_exchanged(scheduler: SchedulerInfo, run: str, addresses: tuple[str, ...]) -> SchedulerInfo:
    """``scheduler``, completed by what the tasks of an mpirun have exchanged: its id, and the addresses of rank 0."""
    first_host, *others = (scheduler.first_host,) if scheduler.first_host else addresses
    token = scheduler.token or _mpi_token(run)
    ports = scheduler.ports or candidate_ports(token)
    return replace(scheduler, first_host=first_host, other_addresses=tuple(others), token=token, ports=ports)


def _mpi_token(run: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.:@+-]", "-", f"mpi-{run}")[:128]


_MPI_RUN_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")
"""Ids of one mpirun; the scheduler's job id is equal for two mpiruns in one job. MPICH's mpiexec sets no id."""

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_JSRUN = tuple(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PALS = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _lsf(environ: Mapping[str, str]) -> SchedulerInfo | None:
    if environ.get("LSF_PM_TASKID", "1") != "1":
        return _started_without_facts("LSF", "blaunch")
    text, hostfile = environ.get("LSB_MCPU_HOSTS", ""), environ.get("LSB_DJOB_HOSTFILE")
    if not text and not hostfile:
        return None
    words = text.split()
    if len(words) % 2 or not all(re.fullmatch(r"[0-9]{1,9}", slots) for slots in words[1::2]):
        raise UsageError(f"LSB_MCPU_HOSTS={quote(text)}: not a list like hostA 4 hostB 4", slurm.IGNORE)
    names = words[::2]
    # With jsrun the list begins with the node of the job script, which has no GPU: batch2 1 h22n07 42.
    if len(names) > 1 and words[1] == "1" and re.match(r"batch|launch|login", names[0]):
        del names[0]
    hosts = tuple(host for name in dict.fromkeys(names) for host in parse_entry(name, "LSB_MCPU_HOSTS"))
    named = f"{len(hosts)} hosts ({_short(names)})" if hosts else f"hosts in {hostfile}"
    return SchedulerInfo(
        name="LSF",
        kind="hosts",
        description=f"LSF job {environ['LSB_JOBID']}: {named}, reached over ssh",
        hosts=hosts,
        hostfile=None if hosts else hostfile,
    )


def _pbs(environ: Mapping[str, str]) -> SchedulerInfo:
    if environ.get("PBS_NODENUM", "0") != "0":
        return _started_without_facts("PBS", "pbsdsh")
    return SchedulerInfo(
        name="PBS",
        kind="hosts",
        description=f"PBS job {environ['PBS_JOBID']}: hosts in {environ['PBS_NODEFILE']}, reached over ssh",
        hostfile=environ["PBS_NODEFILE"],
    )


def _started_without_facts(name: str, starter: str) -> SchedulerInfo:
    """One of the processes that ``starter`` started, one per node; it must not start the other nodes over ssh."""
    warning = (
        f"{starter} started ddplaunch on this node without any information about the others: start ddplaunch once, in "
        "the job script, or on every node with --nnodes, --node-rank and --rdzv-endpoint"
    )
    return SchedulerInfo(name=name, kind="node", description=f"{name}: started by {starter}", warnings=(warning,))


def _kubernetes(environ: Mapping[str, str]) -> SchedulerInfo:
    index = _number(environ, "JOB_COMPLETION_INDEX", "Kubernetes")
    return SchedulerInfo(
        name="Kubernetes",
        kind="node",
        description=f"Kubernetes indexed job: index {index}",
        index=index,
        first_host=environ.get("MASTER_ADDR") or None,
        ports=_master_port(environ),
        is_server=index == 0,
    )


@dataclass(frozen=True)
class SchedulerRow:
    """One way in which a scheduler starts ddplaunch.

    Attributes:
        word: the value of ``--cluster`` that selects it.
        name: shown in the documentation.
        variables: environment variables that are all set where this scheduler started ddplaunch.
        read: reads the facts; returns None if the variables belong to another job.
    """

    word: str
    name: str
    variables: tuple[str, ...]
    read: Callable[[Mapping[str, str]], SchedulerInfo | None]


def _mpi_row(word: str, name: str, variables: tuple[str, ...], *required: str) -> SchedulerRow:
    return SchedulerRow(word, name, (variables[0], *required), lambda environ: _mpi(name, variables, environ))


TABLE = (
    _mpi_row("openmpi", "Open MPI", _OPEN_MPI),
    _mpi_row("jsrun", "jsrun", _JSRUN),
    _mpi_row("pals", "PALS", _PALS),
    # srun --mpi=pmi2 sets PMI_RANK too.
    _mpi_row("mpich", "MPICH, Intel MPI", _MPICH, "MPI_LOCALRANKID"),
    SchedulerRow("slurm", "SLURM, srun", ("SLURM_STEP_NODELIST",), _slurm_step),
    SchedulerRow("slurm", "SLURM, sbatch or salloc", ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"), _slurm_allocation),
    SchedulerRow("lsf", "LSF", ("LSB_JOBID",), _lsf),
    SchedulerRow("pbs", "PBS", ("PBS_JOBID", "PBS_NODEFILE"), _pbs),
    SchedulerRow("kubernetes", "Kubernetes indexed job", ("JOB_COMPLETION_INDEX",), _kubernetes),
)
"""The rows are tried in this order; the first that applies is used.

A new scheduler needs a row here, its prefix in ``cli.scheduler_options.PREFIXES``, its word in the help of --cluster
(``cli.options``), and a rule for its variables in ``protocol.env_forwarding.RULES``. If it starts several processes,
its rank variable belongs into ``cli.scheduler_options._TASK_VARIABLES``: only the first shows a usage error.
"""

WORDS = ("auto", *dict.fromkeys(row.word for row in TABLE), "none")
"""Values of ``--cluster``."""


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
    for row in rows:
        found = row.read(environ) if all(map(environ.get, row.variables)) else None
        if found is not None:
            return found
    if rows and cluster != "auto":
        variables = " or ".join(" and ".join(row.variables) for row in rows)
        raise UsageError(f"--cluster {cluster}: it did not start ddplaunch, or {variables} would be set")
    return None


def _master_port(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get("MASTER_PORT", "")
    return (int(text),) if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 65536 else ()


def _number(environ: Mapping[str, str], variable: str, name: str) -> int:
    text = environ.get(variable, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        problem = f"{variable}={quote(text)} is not a whole number" if text else f"{variable} is not set"
        raise UsageError(f"{name} started ddplaunch, but {problem}", slurm.IGNORE)
    return int(text)


def _assignments(environ: Mapping[str, str], variables: Iterable[str]) -> str:
    return ", ".join(f"{variable}={environ[variable]}" for variable in variables)


def _short(names: Iterable[str]) -> str:
    return quote(fold(names), 60)
