"""Reads the variables of the scheduler or MPI launcher that started ddplaunch: environment -> ``SchedulerInfo``.

Runs in the launcher, before the configuration is built; ``schedulers.TABLE`` names the readers. Pure, except
``read_hosts``. Must not decide between the scheduler's facts and the user's options: ``cli.scheduler_options`` does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from ddplaunch.cluster import slurm
from ddplaunch.cluster.hostfile import read_hostfile
from ddplaunch.cluster.hostlist import fold
from ddplaunch.cluster.hosts import Host, parse_entry
from ddplaunch.cluster.job import IGNORE, ScheduledTask
from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LOOPBACK = "127.0.0.1"

StartKind = Literal["node", "task", "allocation"]

PORTS = (16384, 28671)
"""First and last candidate port: below the ports that Linux and Kubernetes assign (from 32768 and 30000) and torchrun's
29400 and 29500, above those of most services."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a user can do about a probable mistake, in the words of one scheduler. Empty: nothing is said of it.

    Attributes:
        per_node: the command that starts ``{}`` tasks on each node, consecutive ranks on one.
        export: how variables are given to all tasks.
        cpus: what gives a task more CPUs.
        gpus: what lets each task see all GPUs of its node.
        shell: for a terminal: how the step of a shell is no part of the run.
        node_rank: why the user may have given node rank 0 on every node.
    """

    per_node: str = ""
    export: str = ""
    cpus: str = ""
    gpus: str = ""
    shell: str = ""
    node_rank: str = ""


@dataclass(frozen=True, kw_only=True)
class SchedulerInfo:
    """The scheduler that started ddplaunch, and the facts that its environment variables hold.

    Attributes:
        name: the scheduler's name, for messages.
        kind: how ddplaunch was started. ``node``: once per node. ``task``: once per worker; this process is for the
            worker ``task``. ``allocation``: once, for all ``hosts``.
        transport: how ``hosts`` of an allocation are reached.
        description: one line for ``-v``.
        index: this launcher's number among ``launchers``; None if unknown.
        launchers: number of launchers that were started, one per node, or one per worker for a ``task``; None if
            unknown. Each has one agent in the rendezvous.
        hosts: the nodes in the scheduler's order, without slots, because schedulers count CPUs, not workers.
        find_hosts: finds the nodes where the environment does not name them, as in a file; see ``read_hosts``.
        first_host: host that serves the rendezvous; None if unknown, see ``missing_endpoint_error``.
        other_addresses: further addresses of the first host, in the order to try.
        ports: candidate ports of the rendezvous, in the order to try; see ``candidate_ports``.
        token: text that is equal in all launchers of a run and differs between runs; a valid run id. None if unknown.
        is_server: this launcher's agent serves the rendezvous: one of ``launchers`` must. False for an ``allocation``.
        this_host: the name of this machine among ``hosts``, where the environment says it.
        warnings: probable mistakes, one sentence each, which are shown whatever the kind is.
        endpoint_warning: the same, of an endpoint that the user gives though ddplaunch was started once; may be empty.
        cpus: number of CPUs that the scheduler has given this launcher on its node; None if unknown.
        user_variables: variables of workers that the user may have set for all launchers, so that they are no mistake.
        advice: against probable mistakes.
    """

    name: str
    kind: StartKind
    description: str
    is_server: bool
    index: int | None = None
    launchers: int | None = None
    hosts: tuple[Host, ...] = ()
    find_hosts: Callable[[], tuple[Host, ...]] | None = None
    first_host: str | None = None
    other_addresses: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    token: str | None = None
    transport: str = "ssh"
    task: ScheduledTask | None = None
    this_host: str | None = None
    warnings: tuple[str, ...] = ()
    endpoint_warning: str = ""
    cpus: int | None = None
    user_variables: tuple[str, ...] = ("MASTER_ADDR", "MASTER_PORT")
    advice: Advice = Advice()


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
    """The hosts of ``scheduler``, which are searched only now; without slots, which count CPUs in its files.

    Raises:
        UsageError: they cannot be found.
    """
    hosts = scheduler.find_hosts() if scheduler.find_hosts else scheduler.hosts
    return tuple(replace(host, slots=None) for host in hosts)


_OUTSIDE_SRUN = (
    "this is not a step of srun: it runs on one node only, and SLURM_NODEID and SLURM_PROCID are 0 there; put srun "
    "before ddplaunch, or leave out the options of the rendezvous"
)


_SRUN = Advice(
    per_node="srun --ntasks-per-node={}",
    cpus="srun -c, --cpus-per-task, gives a task more",
    gpus="srun --gpu-bind=none",
    shell="a shell of srun --pty is one of them: use --cluster none in it, or srun --overlap",
    node_rank="the shell of a batch script makes 0 of $SLURM_NODEID",
)


def slurm_step(environ: Mapping[str, str]) -> SchedulerInfo | None:
    """A step that srun started."""
    step = slurm.read_step(environ)
    if step is None:
        return None
    nodes, per_node = len(step.hosts), step.tasks_per_node
    token = f"slurm-{step.job_id}.{step.step_id}.{step.requeue_count}"
    where = f"SLURM job {step.job_id}, step {step.step_id}: node {step.node_id} of {nodes} ({_short(step.hosts)})"
    task = ScheduledTask(step.rank, step.local_rank, sum(per_node), per_node[step.node_id], step.node_id, per_node)
    is_task, cpus = max(per_node) > 1, environ.get("SLURM_CPUS_ON_NODE", "")
    return SchedulerInfo(
        name="SLURM",
        kind="task" if is_task else "node",
        description=f"{where}, rank {step.rank} of {sum(per_node)}" if is_task else where,
        index=step.rank,
        launchers=sum(per_node),
        hosts=tuple(map(Host, step.hosts)),
        first_host=LOOPBACK if nodes == 1 else step.hosts[0],
        ports=(*step.reserved_ports[:8], *candidate_ports(token))[:8],
        token=token,
        is_server=step.node_id == step.local_rank == 0,
        task=task if is_task else None,
        warnings=tuple(slurm.lint(environ, step)),
        cpus=None if is_task or not cpus.isdecimal() else int(cpus),
        user_variables=(),
        advice=_SRUN,
    )


def slurm_allocation(environ: Mapping[str, str]) -> SchedulerInfo | None:
    """The shell or script of a job, outside of its steps: this launcher starts all nodes, through srun."""
    hosts = slurm.read_allocation(environ)
    if not hosts:
        return None
    job = f"SLURM job {environ['SLURM_JOB_ID']}"
    return SchedulerInfo(
        name="SLURM",
        kind="allocation",
        transport="srun",
        description=f"{job}: {len(hosts)} nodes ({_short(hosts)}), not in a step of srun",
        is_server=False,
        hosts=tuple(map(Host, hosts)),
        this_host=environ.get("SLURMD_NODENAME"),
        warnings=tuple(slurm.lint(environ, None)),
        endpoint_warning=_OUTSIDE_SRUN if len(hosts) > 1 else "",
        user_variables=(),
        advice=_SRUN,
    )


def _mpi(
    name: str, variables: tuple[str, ...], per_node: str, export: str, environ: Mapping[str, str]
) -> SchedulerInfo:
    """A process of an MPI launcher; ``variables`` are the names of its rank, size, local rank and local size."""
    rank, size, local_rank, local_size = (_number(environ, variable, name) for variable in variables)
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(f"{name}'s variables contradict each other: {_assignments(environ, variables)}", IGNORE)
    by_node = rank % local_size == local_rank
    tasks_per_node = () if size % local_size else (local_size,) * (size // local_size)
    task = ScheduledTask(rank, local_rank, size, local_size, rank // local_size if by_node else None, tasks_per_node)
    run = next((environ[id_] for id_ in _MPI_RUN_IDS if environ.get(id_)), "")
    token = _token(run) if run else None
    return SchedulerInfo(
        name=name,
        kind="task" if local_size > 1 else "node",
        description=f"{name}: rank {rank} of {size}, local rank {local_rank} of {local_size}",
        index=rank,
        launchers=size,
        first_host=LOOPBACK if size == local_size else environ.get("MASTER_ADDR") or None,
        ports=_master_port(environ) or (candidate_ports(token) if token else ()),
        token=token,
        is_server=rank == 0,
        task=task if local_size > 1 else None,
        advice=Advice(per_node=per_node, export=export),
    )


def with_exchanged(scheduler: SchedulerInfo, run: str, addresses: tuple[str, ...]) -> SchedulerInfo:
    """``scheduler``, completed by what the tasks have exchanged: the id of their start, and the addresses of rank 0."""
    first_host, *others = (scheduler.first_host,) if scheduler.first_host else addresses
    token = scheduler.token or _token(run)
    ports = scheduler.ports or candidate_ports(token)
    return replace(scheduler, first_host=first_host, other_addresses=tuple(others), token=token, ports=ports)


def _token(run: str) -> str:
    """A token of the id that a process manager has given to one start of all tasks."""
    return re.sub(r"[^A-Za-z0-9_.:@+-]", "-", f"mpi-{run}")[:128]


_MPI_RUN_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")
"""Ids of one mpirun; the scheduler's job id is equal for two mpiruns in one job. MPICH's mpiexec sets no id."""

open_mpi = partial(
    _mpi,
    "Open MPI",
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpirun --map-by ppr:{}:node",
    "mpirun -x",
)
jsrun = partial(
    _mpi,
    "jsrun",
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    "jsrun --rs_per_host 1 --tasks_per_rs {}",
    "jsrun -E",
)
pals = partial(
    _mpi,
    "PALS",
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "mpiexec --ppn {}",
    "mpiexec --env",
)
mpich = partial(
    _mpi,
    "MPICH, Intel MPI",
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "mpiexec -ppn {}",
    "mpiexec -genv",
)


def lsf(environ: Mapping[str, str]) -> SchedulerInfo | None:
    """The script of a job, which starts all nodes over SSH."""
    if environ.get("LSF_PM_TASKID", "1") != "1":
        return _started_without_facts("LSF", "blaunch")
    text, hostfile = environ.get("LSB_MCPU_HOSTS", ""), environ.get("LSB_DJOB_HOSTFILE")
    if not text and not hostfile:
        return None
    words = text.split()
    if len(words) % 2 or not all(re.fullmatch(r"[0-9]{1,9}", slots) for slots in words[1::2]):
        raise UsageError(f"LSB_MCPU_HOSTS={quote(text)}: not a list like hostA 4 hostB 4", IGNORE)
    names = words[::2]
    # With jsrun the list begins with the node of the job script, which has no GPU: batch2 1 h22n07 42.
    if len(names) > 1 and words[1] == "1" and re.match(r"batch|launch|login", names[0]):
        del names[0]
    hosts = tuple(host for name in dict.fromkeys(names) for host in parse_entry(name, "LSB_MCPU_HOSTS"))
    named = f"{len(hosts)} hosts ({_short(names)})" if hosts else f"hosts in {hostfile}"
    return SchedulerInfo(
        name="LSF",
        kind="allocation",
        description=f"LSF job {environ['LSB_JOBID']}: {named}, reached over ssh",
        is_server=False,
        hosts=hosts,
        find_hosts=None if hosts or not hostfile else partial(read_hostfile, hostfile),
    )


def pbs(environ: Mapping[str, str]) -> SchedulerInfo:
    """As for LSF."""
    if environ.get("PBS_NODENUM", "0") != "0":
        return _started_without_facts("PBS", "pbsdsh")
    return SchedulerInfo(
        name="PBS",
        kind="allocation",
        description=f"PBS job {environ['PBS_JOBID']}: hosts in {environ['PBS_NODEFILE']}, reached over ssh",
        is_server=False,
        find_hosts=partial(read_hostfile, environ["PBS_NODEFILE"]),
    )


def _started_without_facts(name: str, starter: str) -> SchedulerInfo:
    """One of the processes that ``starter`` started, one per node; it must not start the other nodes over ssh."""
    warning = (
        f"{starter} started ddplaunch on this node without any information about the others: start ddplaunch once, in "
        "the job script, or on every node with --nnodes, --node-rank and --rdzv-endpoint"
    )
    text = f"{name}: started by {starter}"
    return SchedulerInfo(name=name, kind="node", description=text, is_server=False, warnings=(warning,))


def kubernetes(environ: Mapping[str, str]) -> SchedulerInfo:
    """A pod of an indexed job."""
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


def _master_port(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get("MASTER_PORT", "")
    return (int(text),) if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 65536 else ()


def _number(environ: Mapping[str, str], variable: str, name: str) -> int:
    text = environ.get(variable, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        problem = f"{variable}={quote(text)} is not a whole number" if text else f"{variable} is not set"
        raise UsageError(f"{name} started ddplaunch, but {problem}", IGNORE)
    return int(text)


def _assignments(environ: Mapping[str, str], variables: Iterable[str]) -> str:
    return ", ".join(f"{variable}={environ[variable]}" for variable in variables)


def _short(names: Iterable[str]) -> str:
    return quote(fold(names), 60)
