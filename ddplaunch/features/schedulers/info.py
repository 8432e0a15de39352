"""A scheduler or MPI launcher: its row of the table, and what it says of its job and of how it started ddplaunch.

Pure. Used in the launcher, before the configuration is built: the reader that a row names makes a SchedulerInfo, and
``scheduler`` decides between these facts and the user's options.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

from ddplaunch.cluster.hosts import Host
from ddplaunch.cluster.scheduled import ScheduledTask
from ddplaunch.late_dataclass import dataclass

LOOPBACK = "127.0.0.1"

StartKind = Literal["node", "task", "allocation"]

PORTS = (16384, 28671)
"""First and last candidate port: below the ports that Linux and Kubernetes assign (from 32768 and 30000) and torchrun's
29400 and 29500, above those of most services."""

IGNORE_HINT = "`--cluster none` makes ddplaunch ignore the scheduler."
"""A hint of usage errors about what a scheduler has set."""


@dataclass(frozen=True, kw_only=True)
class SchedulerRow:
    """One way in which a scheduler starts ddplaunch. The innermost that has started it counts.

    Attributes:
        word: the value of ``--cluster`` for this scheduler; several rows may have it.
        layer: who starts ddplaunch. ``mpi``: an MPI launcher, which may run inside a job or a step, as mpirun behind
            srun. ``step``: another command inside a job, as srun. ``job``: the scheduler itself, as the script of a
            job, or a pod. Rows of ``mpi`` are tried first, then those of ``step``, then those of ``job``.
        variables: environment variables that are all set where this scheduler started ddplaunch.
        reader: ``module:name`` of the function that reads its environment variables into a ``SchedulerInfo``. It
            returns None if they are those of another job, or say too little.
        job_reader: for SLURM: ``module:name`` of the function that reads ``LaunchConfig.slurm_job`` of these variables,
            and of whether this is the run's first launcher. No other row has one: that field is about SLURM.
        own_variables: patterns of the names of its variables, which are not forwarded to other machines.
        ranks: variables in which it numbers the processes that it starts with one terminal: only the first of them
            shows a usage error.
        job: variables that identify a job: a keeper serves only the job in which it was started, and ends with it. The
            first of them is set in every process of the job. Only one row of a scheduler has them.
        job_processes: names of processes of the scheduler: the nearest ancestor of the launcher with one of them ends
            when the job ends. Empty: the outermost ancestor that has the first variable of ``job`` is taken for that.
        ends: ``module:name`` of the function that says when the job ends; empty: it is not known. It takes the
            environment, and returns seconds since 1970, infinity for a job without a limit, None if it is not known.
            It may run a command, for up to 5 s. With ``anew=False`` variables suffice; they keep what held when the job
            was started. Only a row with ``job`` has it.
    """

    word: str
    layer: Literal["mpi", "step", "job"]
    variables: tuple[str, ...]
    reader: str
    own_variables: tuple[str, ...]
    job_reader: str = ""
    ranks: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    job_processes: tuple[str, ...] = ()
    ends: str = ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a user can do about a probable mistake, in the words of one scheduler. Empty: nothing is said of it.

    Attributes:
        per_node: the command that starts ``{}`` tasks on each node, consecutive ranks on one.
        cpus: what gives a task more CPUs.
        gpus: what lets each task see all GPUs of its node.
        shell: for a terminal: how the step of a shell is no part of the run.
        node_rank: why the user may have given node rank 0 on every node.
        export: what gives variables to all processes, like ``mpirun -x``.
    """

    per_node: str = ""
    cpus: str = ""
    gpus: str = ""
    shell: str = ""
    node_rank: str = ""
    export: str = ""


@dataclass(frozen=True, kw_only=True)
class SchedulerInfo:
    """The scheduler that started ddplaunch, and the facts that its environment variables hold.

    What each ``kind`` needs, besides ``name``, ``description`` and ``is_server``:

    - ``allocation``: ``find_hosts``, and ``transport`` if they are not reached over SSH.
    - ``node``, of several: ``first_host`` and ``ports``, the same in all launchers, or ``find_endpoint``, which finds
      them; ``token``, of which ``candidate_ports`` makes ports; ``index`` and ``launchers``, if they are known. One of
      the launchers ``is_server``.
    - ``task``: the same, and ``task``.

    Attributes:
        name: the scheduler's name, for messages.
        kind: how ddplaunch was started. ``node``: once per node. ``task``: once per worker; this process is for the
            worker ``task``. ``allocation``: once, for all nodes.
        description: one line for ``-v``.
        index: this launcher's number among ``launchers``, for a ``task`` its rank; None if unknown.
        launchers: number of launchers that were started, one per node, or one per worker for a ``task``; None if
            unknown. Each has one agent in the rendezvous.
        find_hosts: for an ``allocation``: returns its nodes in the scheduler's order. It may read a file, but
            runs no command, and may raise UsageError.
        transport: name of the row of ``transport.transports.TABLE`` by which the hosts are reached.
        this_host: which of the hosts of ``find_hosts`` this machine is, by name, if the environment says it.
        find_endpoint: takes this SchedulerInfo and returns it with ``first_host`` and ``ports``, if it can find them.
            It may read a file or ask the other launchers, and may raise UsageError. None: there is no further way.
        first_host: host that serves the rendezvous; None if unknown.
        other_addresses: further addresses of the first host, in the order to try.
        ports: candidate ports of the rendezvous, in the order to try; see ``candidate_ports``.
        token: text that is equal in all launchers of a run and differs between runs, and a valid run id: it becomes the
            run id, and names the run folder. None: the nodes tell runs apart by --rdzv-id only.
        is_server: this launcher's agent serves the rendezvous: one of ``launchers`` must. False for an ``allocation``.
        warnings: probable mistakes, one sentence each.
        endpoint_warning: for an ``allocation``: the warning if the user gives an endpoint all the same; empty: none.
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
    find_hosts: Callable[[], tuple[Host, ...]] = tuple
    transport: str = "ssh"
    this_host: str | None = None
    find_endpoint: Callable[[SchedulerInfo], SchedulerInfo] | None = None
    first_host: str | None = None
    other_addresses: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    token: str | None = None
    task: ScheduledTask | None = None
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
