"""What the user asked for, as one frozen value: options -> LaunchConfig. Pure: reads no file, starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ddplaunch.hosts import Host  # noqa: TC004
    from ddplaunch.injection import Injection  # noqa: TC004
    from ddplaunch.job import Job  # noqa: TC004
    from ddplaunch.task import Task  # noqa: TC004

Entry = Literal["script", "module", "program"]
StartMethod = Literal["forkserver", "spawn"]
NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]

MAX_WORKERS_PER_NODE = 4096
"""Beyond this a typing mistake is likelier than a machine: the kernel's default pid limit is 32,768."""

MAX_SHUTDOWN_TIMEOUT_S = 7 * 86400.0
"""Beyond this a typing mistake is likelier, and not much further the lock calls of CPython overflow."""

NO_LOGS = "/dev/null"


@dataclass(frozen=True)
class Streams:
    """Which of a worker's streams a setting covers, as torchrun's bit mask: 1 stdout, 2 stderr, 3 both.

    ``default`` holds for local ranks that ``by_local_rank`` does not name.
    """

    default: int = 0
    by_local_rank: tuple[tuple[int, int], ...] = ()

    def covers(self, local_rank: int, stream: Literal["stdout", "stderr"]) -> bool:
        """Whether the setting holds for this stream of this worker."""
        mask = dict(self.by_local_rank).get(local_rank, self.default)
        return bool(mask & (1 if stream == "stdout" else 2))


@dataclass(frozen=True)
class Rehearsal:
    """How a dry run's workers pretend to be on a GPU node.

    Attributes:
        gpus: how many the node pretends to have; 0 until its agent has counted what its workers need.
        compiles: ``torch.compile`` compiles for the CPU; else it leaves functions as they are.
    """

    gpus: int = 0
    compiles: bool = False


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the agent of one node of several meets the others.

    Attributes:
        token: what the nodes of one run have in common; another run at the same endpoint has another.
        node_rank: this node's number; None for the order of arrival.
        hosts: names or addresses of the node that serves, best first; empty for that node to find out its own.
        other_ports: the node that serves takes the first free one of ``port`` and these, and the others find it.
        serves: this node serves the store; None to find out by comparing addresses.
        seats: numbers of all nodes in rank order, where a launcher says so and this node serves; else empty.
        attempt: the first round's number; more than 0 at a place that the run has moved to, likewise ``restarts``.
        local_addr: where other nodes reach this one; None for its address on the way to the endpoint.
        interface: the same, by the network interface's name; ``local_addr`` wins.
        join_timeout_s: how long to wait for MIN nodes; ``last_call_s`` then for more; ``silence_s`` for any answer.
        lost_after_s: a node whose heartbeat rests this long is lost.
    """

    token: str
    min_nodes: int
    max_nodes: int
    node_rank: int | None
    hosts: tuple[str, ...]
    port: int
    serves: bool | None
    local_addr: str | None
    interface: str | None
    join_timeout_s: float
    last_call_s: float
    lost_after_s: float
    silence_s: float | None = None
    seats: tuple[int, ...] = ()
    attempt: int = 0
    restarts: int = 0
    other_ports: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Remote:
    """How other machines are reached, by ssh or ``by_srun``, and what they are given. None leaves it to ssh's settings.

    Attributes:
        accept_new: take the keys of unknown hosts, and keep them, as ``ssh -o StrictHostKeyChecking=accept-new``.
        connect_timeout_s: for one attempt, from the name to being logged in.
        python: interpreter there; None for the path of the launcher's own.
        setup: shell text that runs there first, in a login shell.
        environ: variables that the workers get, as pairs.
    """

    user: str | None = None
    port: int | None = None
    identity: str | None = None
    config: str | None = None
    accept_new: bool = False
    connect_timeout_s: float = 15.0
    python: str | None = None
    setup: str = ""
    environ: tuple[tuple[str, str], ...] = ()
    by_srun: bool = False


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """One run, as the user asked for it. Field names are the options' names; units are in the names.

    Attributes:
        script: path of the script, name of the module, or program, as ``entry`` says.
        nproc_per_node: workers per node, a word of torchrun's (``auto``, ``cpu``, ``gpu``, ``xpu``), or None for one
            worker per GPU and one without GPUs.
        gpus: device ids of this node that workers may use; None for all that CUDA_VISIBLE_DEVICES allows.
        gpus_per_proc: devices each worker sees; 0 leaves every worker the node's devices, as torchrun does.
        python: interpreter that runs the script; None for the launcher's own.
        hang_timeout_s: after so long without a line of any worker the job counts as hung; None: it never does.
        signals: names of the signals that stop the job; SIGUSR1/SIGUSR2 are passed on instead unless named here.
        log_dir: base folder of the logs; None for the default folder, ``/dev/null`` for no files.
        collect_logs: at the end bring all log files of other machines to the run's folder.
        meeting: where the nodes' launchers meet, one per node; needed with more than one node.
        show_ranks: global ranks whose output reaches the console; None for all.
        show_local_ranks: the same by local rank; where both are given a worker must be in both.
        line_prefix: template of a console line's prefix: torchrun's macros and ``${host}``; None: ``[host:rank] ``.
        join_timeout_s: how long the nodes that this launcher starts may take to meet; a Meeting has its own.
        lost_after_s: how long one of them may be silent; likewise.
        hosts: machines that one launcher starts all nodes on, the first ``max_nodes`` of them; the rest are spares.
        chdir: working directory of the workers on every node; None for the launcher's.
        interface: network interface by which the nodes reach each other; None to find out.
        dry_run: all nodes are pretended ones on this machine, and their GPUs are rehearsed on the CPU.
        rehearse_compile: in a dry run ``torch.compile`` compiles for the CPU.
        injections: failures to rehearse in a dry run.
        task: the one worker that this is, where a scheduler started every worker by itself.
        job: SLURM's, if the run is in one; the signals of its ``requeue_on`` are among ``signals``.
        notices: to be told at the start: from which ``verbosity`` on, and the text.
        verbosity: -1 quiet, 0 normal, 1 verbose.

    Raises:
        UsageError: a value or a combination that cannot be meant.
    """

    script: str
    script_args: tuple[str, ...] = ()
    entry: Entry = "script"
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int | str | None = None
    gpus: tuple[str, ...] | None = None
    gpus_per_proc: int = 0
    virtual_local_rank: bool = False
    pass_local_rank: bool = False
    run_id: str | None = None
    role: str = "default"
    max_restarts: int = 0
    start_method: StartMethod = "forkserver"
    preload: tuple[str, ...] = ()
    python: str | None = None
    numa_binding: NumaBinding | None = None
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    meeting: Meeting | None = None
    shutdown_timeout_s: float = 30.0
    hang_timeout_s: float | None = None
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    log_dir: str | None = None
    collect_logs: bool = False
    redirects: Streams = field(default_factory=Streams)
    tee: Streams = field(default_factory=Streams)
    show_ranks: frozenset[int] | None = None
    show_local_ranks: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    line_prefix: str | None = None
    events: Literal["null", "console"] = "null"
    join_timeout_s: float = 600.0
    lost_after_s: float = 5.0
    hosts: tuple[Host, ...] = ()
    remote: Remote = field(default_factory=Remote)
    chdir: str | None = None
    interface: str | None = None
    dry_run: bool = False
    rehearse_compile: bool = False
    injections: tuple[Injection, ...] = ()
    task: Task | None = None
    job: Job | None = None
    notices: tuple[tuple[int, str], ...] = ()
    verbosity: int = 0

    def __post_init__(self) -> None:
        from ddplaunch import config_checks

        config_checks.check(self)

    @property
    def is_led(self) -> bool:
        """One launcher starts all nodes and tells them where to meet."""
        return self.meeting is None and self.max_nodes > 1
