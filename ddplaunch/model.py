"""The values that flow between the processes of a run, each frozen, each one JSON object on the wire.

Times: ``*_time_s`` is seconds since the epoch on the host that saw it; ``*_s`` without "time" is a duration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddplaunch.config import Entry, Meeting, NumaBinding, Rehearsal, StartMethod, Streams
from ddplaunch.job import Job
from ddplaunch.task import Task

StreamName = Literal["stdout", "stderr"]
Certainty = Literal["no", "perhaps", "yes"]
Outcome = Literal["succeeded", "failed", "stopped"]


@dataclass(frozen=True)
class Program:
    """What every worker runs; ``python`` is the interpreter's path, empty for the agent's, unused for a program."""

    entry: Entry
    path: str
    args: tuple[str, ...]
    python: str


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """All that an agent needs to know, the first record on its stdin.

    Attributes:
        host: the node's display name.
        log_dir: absolute folder of the run on this node; None keeps no files.
        sends_logs: all files of ``log_dir`` are the launcher's to ask for at the end.
        own_folder: ``log_dir`` is instead the base of a run folder of this name that the agent makes, None for the
            default base.
        stdin_fd: inherited descriptor that becomes the workers' stdin; None means /dev/null.
        stdout_fd: the user's terminal for a lone worker; None means the worker's stdout is piped. Likewise stderr_fd.
        meeting: where to meet the other nodes; None if there are none, or if the launcher tells later.
        rehearsal: the node only pretends to have GPUs; None on a real one.
        hang_timeout_s: the job hangs when no worker has written anything for so long; None: never.
        task: this agent's one worker, where a scheduler started every worker by itself.
        is_led: the launcher tells by a record where to meet, and again whenever that changes.
        python_is_ours: ``program.python`` is the interpreter that runs ddplaunch, so workers may be forked.
    """

    run_id: str
    host: str
    program: Program
    python_is_ours: bool
    nproc_per_node: int | str | None
    gpus: tuple[str, ...] | None
    gpus_per_proc: int
    virtual_local_rank: bool
    pass_local_rank: bool
    role: str
    max_restarts: int
    start_method: StartMethod
    preload: tuple[str, ...]
    numa_binding: NumaBinding | None
    master_addr: str | None
    master_port: int | None
    shutdown_timeout_s: float
    hang_timeout_s: float | None
    log_dir: str | None
    redirects: Streams
    tee: Streams
    show_ranks: frozenset[int] | None
    show_local_ranks: frozenset[int] | None
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    stdin_fd: int | None = None
    stdout_fd: int | None = None
    stderr_fd: int | None = None
    meeting: Meeting | None = None
    is_led: bool = False
    own_folder: str = ""
    sends_logs: bool = False
    rehearsal: Rehearsal | None = None
    task: Task | None = None


@dataclass(frozen=True, kw_only=True)
class Round:
    """One attempt as all nodes agree on it: this node's place in it, and where the workers' store listens.

    ``first_rank`` is that of this node's first worker. ``attempt`` numbers the rounds, ``restarts`` counts those that
    followed a failure: a node that joins or leaves starts a round, not a restart.
    """

    attempt: int
    restarts: int
    node_rank: int
    nnodes: int
    first_rank: int
    local_world_size: int
    world_size: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class NodesExpected:
    """The launcher says who takes part from now on, in the order of ranks; who is missing is lost."""

    seats: tuple[int, ...]


@dataclass(frozen=True)
class WorkerError:
    """An exception a worker left in its error file. ``time_s`` is when the file was written."""

    message: str
    traceback: str
    time_s: float


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended.

    Attributes:
        returncode: as ``subprocess``: the exit code, or minus the signal's number.
        stopped: it ran until it was told to stop and had raised nothing before; not a failure of its own.
        time_s: when it failed: its exception's time where it left one, else its exit's.
        out_of_memory: SIGKILL by the kernel, for memory; ``perhaps`` if it is only known that it killed something on
            the machine meanwhile.
        tail: its last lines, stderr's if it wrote any.
        log_file: of its files the one to look at first; None where none were kept.
        whereabouts: when the job hung: the line of Python its main thread was in, and whether anything stopped it.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    returncode: int
    stopped: bool
    time_s: float
    duration_s: float
    error: WorkerError | None = None
    out_of_memory: Certainty = "no"
    tail: tuple[str, ...] = ()
    log_file: str | None = None
    whereabouts: str = ""


@dataclass(frozen=True)
class AttemptResult:
    """One attempt's end; ``exits`` is ordered by rank, ``restarts`` says that another attempt follows.

    ``note`` tells what the exits do not: trouble of ddplaunch's own, or why a failure is not tried again. ``cause`` is
    the job's first failure where other nodes may have it; None where the exits are all there are. ``hung``: it was
    ended because no worker wrote anything for too long.
    """

    attempt: int
    outcome: Outcome
    exits: tuple[WorkerExit, ...]
    duration_s: float
    restarts: bool = False
    note: str = ""
    cause: WorkerExit | None = None
    hung: bool = False


@dataclass(frozen=True)
class Injected:
    """What became of one ``--inject``: how far into its attempt it happened, None if it did not, and the account."""

    text: str
    after_s: float | None
    account: str


@dataclass(frozen=True)
class RunResult:
    """The one verdict of a run.

    Attributes:
        run_dir: the run's folder with logs, report.txt and report.json; None where none was kept.
        signal: name of the signal that stopped the run, or None.
        left: pids that could not be ended; empty is the promise.
        unasked: hosts of lost nodes that could not be asked what is left there.
        job: SLURM's, if the run was in one; ``requeues`` if it ended so that SLURM runs it again.
    """

    run_id: str
    exit_code: int
    outcome: Outcome
    duration_s: float
    attempts: tuple[AttemptResult, ...] = ()
    first_failure: WorkerExit | None = None
    signal: str | None = None
    run_dir: str | None = None
    left: tuple[int, ...] = ()
    unasked: tuple[str, ...] = ()
    injections: tuple[Injected, ...] = ()
    job: Job | None = None
    requeues: bool = False
