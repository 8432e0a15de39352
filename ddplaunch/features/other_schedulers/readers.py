"""Reads the variables of these schedulers and MPI launchers: environment -> ``SchedulerInfo``.

Runs in the launcher, before the configuration is built. The readers are pure. What needs more than the variables is a
function in the ``SchedulerInfo``, which is called only where it is needed: it reads the file with the hosts, or asks
the other tasks for the endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from ddplaunch.cluster.hostfile import read_hostfile
from ddplaunch.cluster.hosts import Host, fold, parse_entry
from ddplaunch.cluster.scheduled import ScheduledTask
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.features.schedulers.info import IGNORE_HINT, LOOPBACK, Advice, SchedulerInfo, candidate_ports
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.text import plural, quote


def _mpi(
    name: str,
    variables: tuple[str, ...],
    start_ids: tuple[str, ...],
    per_node: str,
    export: str,
    environ: Mapping[str, str],
) -> SchedulerInfo:
    """A process of an MPI launcher; ``variables`` are the names of its rank, size, local rank and local size."""
    rank, size, local_rank, local_size = (_number(environ, variable, name) for variable in variables)
    return of_process(name, variables, (rank, size, local_rank, local_size), start_ids, per_node, export, environ)


def of_process(
    name: str,
    variables: tuple[str, ...],
    numbers: tuple[int, int, int, int],
    start_ids: tuple[str, ...],
    per_node: str,
    export: str,
    environ: Mapping[str, str],
) -> SchedulerInfo:
    """One of the processes that a launcher has started together, by its rank, size, local rank and local size.

    A launcher may export other numbers; its reader then computes these four. With one process on each node, local rank
    is 0 and local size is 1. With equally many on each, local size is the size divided by the number of nodes.

    Args:
        name: of the launcher, for messages.
        variables: names of those that were read, for a message.
        numbers: rank, size, local rank, local size.
        start_ids: variables with an id of this start of all processes; token and ports are made of the first that is
            set. No id of a job, and no variable of another launcher: two starts inside one job would inherit the same.
        per_node: for messages: the command that starts ``{}`` processes on each node.
        export: for messages: what gives variables to all processes, like ``mpirun -x``.
        environ: the environment of this process.

    Raises:
        UsageError: the numbers contradict each other.
    """
    rank, size, local_rank, local_size = numbers
    if not (rank < size and local_rank < local_size <= size):
        assignments = ", ".join(f"{variable}={environ[variable]}" for variable in variables)
        raise UsageError(f"{name}'s variables contradict each other: {assignments}", IGNORE_HINT)
    by_node = rank % local_size == local_rank
    tasks_per_node = () if size % local_size else (local_size,) * (size // local_size)
    task = ScheduledTask(rank, local_rank, size, local_size, rank // local_size if by_node else None, tasks_per_node)
    start_id = next((environ[id_] for id_ in start_ids if environ.get(id_)), "")
    token = _token(start_id) if start_id else None
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
        find_endpoint=partial(_find_endpoint, environ),
        advice=Advice(per_node=per_node, export=export),
    )


def _find_endpoint(environ: Mapping[str, str], scheduler: SchedulerInfo) -> SchedulerInfo:
    """``scheduler`` with the endpoint that its tasks exchange, if their variables do not name it, and they can.

    Raises:
        UsageError: the tasks could not exchange it.
        LaunchError: no room for a thread.
    """
    if scheduler.first_host and scheduler.ports:
        return scheduler
    try:
        return _exchanged(environ, scheduler)
    except OSError as error:
        from ddplaunch.features.schedulers.checks import endpoint_hint

        message = f"the tasks of {scheduler.name} cannot agree on a rendezvous: {error}"
        raise UsageError(message, endpoint_hint(scheduler)) from None
    except RuntimeError as error:  # "can't start new thread"
        raise LaunchError(f"the launcher cannot start: {error}", NO_ROOM_HINT) from None


def _exchanged(environ: Mapping[str, str], scheduler: SchedulerInfo) -> SchedulerInfo:
    """``scheduler`` with host, ports and token that its tasks exchange, where its variables do not say them."""
    from ddplaunch.features.other_schedulers import endpoint_exchange
    from ddplaunch.system import network

    own = (network.own_addresses({}) or (LOOPBACK,)) if scheduler.is_server else None
    exchanged = endpoint_exchange.exchange(environ, own)
    if exchanged is None:
        return scheduler
    start_id, addresses = exchanged
    first_host, *others = (scheduler.first_host,) if scheduler.first_host else addresses
    token = scheduler.token or _token(start_id)
    ports = scheduler.ports or candidate_ports(token)
    return replace(scheduler, first_host=first_host, other_addresses=tuple(others), token=token, ports=ports)


def _token(start_id: str) -> str:
    """A token of the id that a process manager has given to one start of all tasks."""
    return re.sub(r"[^A-Za-z0-9_.:@+-]", "-", f"mpi-{start_id}")[:128]


open_mpi = partial(
    _mpi,
    "Open MPI",
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpirun --map-by ppr:{}:node",
    "mpirun -x",
)
jsrun = partial(
    _mpi,
    "jsrun",
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    ("PMIX_NAMESPACE",),
    "jsrun --rs_per_host 1 --tasks_per_rs {}",
    "jsrun -E",
)
pals = partial(
    _mpi,
    "PALS",
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PALS_APID",),
    "mpiexec --ppn {}",
    "mpiexec --env",
)
mpich = partial(
    _mpi,
    "MPICH, Intel MPI",
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (),  # mpiexec sets no id.
    "mpiexec -ppn {}",
    "mpiexec -genv",
)


def lsf(environ: Mapping[str, str]) -> SchedulerInfo | None:
    """The script of a job, which starts all nodes over SSH; or the second or a later task of blaunch.

    The script may have the number of the first task, 1, so that one acts as the script: only the others can be told.
    """
    if environ.get("LSF_PM_TASKID", "1") != "1":
        return _started_without_facts(environ, "LSF", "blaunch")
    text, hostfile = environ.get("LSB_MCPU_HOSTS", ""), environ.get("LSB_DJOB_HOSTFILE")
    if not text and not hostfile:
        return None
    words = text.split()
    if len(words) % 2 or not all(re.fullmatch(r"[0-9]{1,9}", slots) for slots in words[1::2]):
        raise UsageError(f"LSB_MCPU_HOSTS={quote(text)}: not a list like hostA 4 hostB 4", IGNORE_HINT)
    names = words[::2]
    if len(names) > 1 and words[1] == "1" and _is_for_scripts(names[0]):
        del names[0]
    hosts = tuple(host for name in dict.fromkeys(names) for host in parse_entry(name, "LSB_MCPU_HOSTS"))
    named = f"{plural(len(hosts), 'host')} ({_folded(names)})" if hosts else f"hosts in {hostfile}"
    return SchedulerInfo(
        name="LSF",
        kind="allocation",
        description=f"LSF job {environ['LSB_JOBID']}: {named}, reached over ssh",
        is_server=False,
        find_hosts=partial(_lsf_hosts, hostfile) if hostfile and not hosts else lambda: hosts,
    )


def _is_for_scripts(name: str) -> bool:
    """With jsrun a job's list begins with the node of its script, which has no GPU: batch2 1 h22n07 42."""
    return bool(re.match(r"batch|launch|login", name))


def _lsf_hosts(path: str) -> tuple[Host, ...]:
    """The hosts of $LSB_DJOB_HOSTFILE, which has a line for each slot."""
    hosts = read_hostfile(path)
    is_extra = len(hosts) > 1 and hosts[0].slots in (None, 1) and _is_for_scripts(hosts[0].name)
    return _without_slots(hosts[1:] if is_extra else hosts)


def pbs(environ: Mapping[str, str]) -> SchedulerInfo:
    """The script of a job, which starts all nodes over SSH."""
    if environ.get("PBS_NODENUM", "0") != "0":
        return _started_without_facts(environ, "PBS", "pbsdsh")
    return SchedulerInfo(
        name="PBS",
        kind="allocation",
        description=f"PBS job {environ['PBS_JOBID']}: hosts in {environ['PBS_NODEFILE']}, reached over ssh",
        is_server=False,
        find_hosts=partial(_from_file, environ["PBS_NODEFILE"]),
    )


def _started_without_facts(environ: Mapping[str, str], name: str, starter: str) -> SchedulerInfo:
    """One of the processes that ``starter`` started, one per node; it must not start the other nodes over ssh.

    With ``--nnodes`` alone it has to find the others: ``find_endpoint`` asks a process manager, or says what to give.
    """
    warning = (
        f"{starter} started ddplaunch on this node without any information about the others: start ddplaunch once, in "
        "the job script, or on every node with --nnodes, --node-rank and --rdzv-endpoint"
    )
    return SchedulerInfo(
        name=name,
        kind="node",
        description=f"{name}: started by {starter}",
        is_server=False,
        find_endpoint=partial(_find_endpoint, environ),
        warnings=(warning,),
    )


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
        find_endpoint=partial(_find_endpoint, environ),
        is_server=index == 0,
    )


def _from_file(path: str) -> tuple[Host, ...]:
    return _without_slots(read_hostfile(path))


def _without_slots(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """``hosts`` of a scheduler's file, whose slots are CPUs, not workers."""
    return tuple(replace(host, slots=None) for host in hosts)


def _master_port(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get("MASTER_PORT", "")
    return (int(text),) if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 65536 else ()


def _number(environ: Mapping[str, str], variable: str, name: str) -> int:
    text = environ.get(variable, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        problem = f"{variable}={quote(text)} is not a whole number" if text else f"{variable} is not set"
        raise UsageError(f"{name} started ddplaunch, but {problem}", IGNORE_HINT)
    return int(text)


def _folded(names: Iterable[str]) -> str:
    return quote(fold(names), 60)
