"""Everything a user can set, as one frozen and validated value: ``LaunchConfig`` and its groups of settings.

Read by the launcher; agents receive the groups. A LaunchConfig validates itself. Pure: reads no file, starts nothing.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST, Host
from ddplaunch.cluster.rendezvous_config import RendezvousConfig as RendezvousConfig
from ddplaunch.cluster.scheduled import ScheduledTask, SlurmJob
from ddplaunch.errors import OptionError, StartNotice, UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import KEEPER_ID, is_run_id
from ddplaunch.timeouts import TimeoutConfig

Entry = Literal["script", "module", "program", "function"]
StartMethod = Literal["forkserver", "spawn"]
CompileCache = Literal["local", "off"]
NumaBinding = Literal["auto", "node", "socket", "exclusive", "core-complex", "off"]
CheckFirst = Literal["quick", "deep"]
HealthPolicy = Literal["off", "warn", "refuse"]

_MIN_LOST_AFTER_S, _MIN_WITHOUT_HEARTBEAT_S = 3.0, 1.5
"""Pings and heartbeats are sent once a second; one or two late answers to pings do not show that a node is lost."""

_MAX_SIMULATED_NODES = 256
_MAX_KEPT_S = 7 * 86400
NO_LOGS, LINE_PREFIX = "/dev/null", "[${host}:${rank}] "


@dataclass(frozen=True)
class Streams:
    """The streams of a worker that a setting covers, as torchrun's bit mask: 1 stdout, 2 stderr, 3 both.

    ``default`` applies to the local ranks that are not in ``by_local_rank``.
    """

    default: int = 0
    by_local_rank: tuple[tuple[int, int], ...] = ()

    def covers(self, local_rank: int, stream: Literal["stdout", "stderr"]) -> bool:
        """Whether the setting covers ``stream`` of the worker with this local rank."""
        mask = dict(self.by_local_rank).get(local_rank, self.default)
        return bool(mask & (1 if stream == "stdout" else 2))


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The workers of a node: their number, their devices, and how they are started.

    Attributes:
        nproc_per_node: workers per node, or ``auto``, ``cpu``, ``gpu``, ``xpu``; None: one per GPU, 1 without GPUs.
        gpus: ids of the devices that workers may use, or ``free:N`` or ``free``; None: all that CUDA_VISIBLE_DEVICES
            allows.
        gpus_per_proc: devices that each worker sees; 0: every worker sees all devices of the node, as with torchrun.
        virtual_local_rank: each worker sees one device, and LOCAL_RANK is 0.
        pass_local_rank: the script gets the argument ``--local-rank=N``.
        role: ROLE_NAME of the workers.
        start_method: ``forkserver`` imports torch once per node and forks; ``spawn`` starts an interpreter per worker.
        preload: modules that the forkserver imports besides torch, in order.
        compile_cache: ``local``: what is compiled is kept on the node's disk; ``off``: where torch and Triton choose.
        numa_binding: binds workers to CPUs near their GPU; ``auto``: where that takes no CPU from the job.
        debug_on_error: the first rank that raises an exception is debugged before the job ends.
        debug_ranks: ranks that stop in a debugger; None: all.
    """

    nproc_per_node: int | str | None = None
    gpus: tuple[str, ...] | None = None
    gpus_per_proc: int = 0
    virtual_local_rank: bool = False
    pass_local_rank: bool = False
    role: str = "default"
    start_method: StartMethod = "forkserver"
    preload: tuple[str, ...] = ()
    compile_cache: CompileCache = "local"
    numa_binding: NumaBinding = "auto"
    debug_on_error: bool = False
    debug_ranks: frozenset[int] | None = None

    def validate(self) -> None:
        """Raise UsageError for an invalid value or combination."""
        nproc = self.nproc_per_node
        if isinstance(nproc, int) and not 1 <= nproc <= MAX_SLOTS_PER_HOST:
            raise OptionError("--nproc-per-node", nproc, f"must be between 1 and {MAX_SLOTS_PER_HOST}")
        if isinstance(nproc, str) and nproc not in ("auto", "cpu", "gpu", "xpu"):
            hint = "Without the option there is one worker per GPU, or one where there is no GPU."
            raise OptionError("--nproc-per-node", nproc, "must be a number or one of auto, cpu, gpu, xpu", hint)
        if self.gpus_per_proc < 0:
            raise OptionError("--gpus-per-proc", self.gpus_per_proc, "must not be negative")
        if self.virtual_local_rank and self.gpus_per_proc:
            options = ("--virtual-local-rank", "--gpus-per-proc")
            raise UsageError(f"{' and '.join(options)} exclude each other", "", options)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Logs, filters and format of the workers' output, and the number of the launcher's messages.

    Attributes:
        log_dir: base folder of the run folders; None: the default folder; ``/dev/null``: no files.
        keep_runs: number of the newest run folders to keep in the default folder; None: 30 days, up to 5 GB.
        collect_logs: copy all log files of other machines to the launcher's run folder when the run ends.
        redirects: streams that are kept off the console.
        tee: streams that are shown on the console even if redirected.
        show_ranks: global ranks whose output reaches the console; None: all.
        show_local_ranks: local ranks whose output reaches the console; None: all. A worker must pass both filters.
        duplicate_stdout_filters: stdout lines that contain one of these texts are copied to ``filtered_stdout.log``.
        duplicate_stderr_filters: stderr lines that contain one of these texts are copied to ``filtered_stderr.log``.
        line_prefix: template of a console line's prefix: torchrun's macros, ${host}, ${time}; None: ``LINE_PREFIX``.
            Empty: bytes are shown as they were written.
        page: make run.html in the run folder, while the run goes on and at its end.
        events: ``console`` writes torchrun's events as JSON lines.
        nccl_report: say which network NCCL has chosen; also without it, if NCCL_DEBUG is INFO.
        samples: agents take usage samples, which the launcher writes to the run folder.
        metrics_file: file that the launcher writes every 10 s, in Prometheus' text format; None: none.
        verbosity: -1 quiet, 0 normal, 1 verbose.
    """

    log_dir: str | None = None
    keep_runs: int | None = None
    collect_logs: bool = False
    redirects: Streams = field(default_factory=Streams)
    tee: Streams = field(default_factory=Streams)
    show_ranks: frozenset[int] | None = None
    show_local_ranks: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    line_prefix: str | None = None
    page: bool = True
    events: Literal["null", "console"] = "null"
    nccl_report: bool = False
    samples: bool = True
    metrics_file: str | None = None
    verbosity: int = 0

    @property
    def keeps_files(self) -> bool:
        """Whether the run has a folder."""
        return self.log_dir != NO_LOGS


@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """Connections to other machines, and variables of the workers.

    Attributes:
        user: login name; None: as in ssh's configuration.
        port: port of the SSH server; None: as in ssh's configuration.
        identity: file with the private key; None: as in ssh's configuration.
        config: ssh configuration file in place of the user's; None: the user's.
        accept_new: accept and store the keys of unknown hosts, as ``ssh -o StrictHostKeyChecking=accept-new``.
        connect_timeout_s: seconds for one attempt, from the name look-up to the login.
        start_timeout_s: seconds from the login, or from the start of srun, to the agent's first record, with ``setup``.
        python: interpreter of the agents, also of those here; None: the path of the launcher's interpreter.
        setup: shell text that runs on the host before the agent, in a login shell.
        environ: variables that all workers get, also those on this machine, as pairs.
        transport: how hosts are reached: ``ssh``, ``srun``, or another row of ``transport.transports.TABLE``.
    """

    user: str | None = None
    port: int | None = None
    identity: str | None = None
    config: str | None = None
    accept_new: bool = False
    connect_timeout_s: float = 15.0
    start_timeout_s: float = 60.0
    python: str | None = None
    setup: str = ""
    environ: tuple[tuple[str, str], ...] = ()
    transport: str = "ssh"


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """The settings that launcher and agents share: ``launcher.setup.agent_spec`` copies each to the ``AgentSpec``.

    Attributes:
        max_restarts: restarts after a failure; attempts only because a node was lost or has joined do not count.
        signals: names of the signals that stop the job. SIGUSR1 and SIGUSR2, if not named, are passed to the workers.
        workers: number of workers of a node, their devices, and how they are started.
        output: logs, filters and format of the workers' output.
        timeouts: time limits of the run.
        rendezvous: rendezvous with the other nodes; None on a single node, or where one launcher leads all nodes.
        master_addr: address of the workers' store on a single node; None: 127.0.0.1. Not used with several nodes.
        master_port: port of the workers' store on a single node; None: a free one. Not used with several nodes.
        task: the only worker of this launcher, where a scheduler started a process for every worker.
        health: what follows if a node's hardware is not sound; ``off``: it is not looked at.
        dry_run: all nodes are simulated on one machine, and their GPUs on the CPU.
        compile_on_cpu: in a dry run ``torch.compile`` compiles for the CPU; otherwise it returns functions unchanged.
    """

    max_restarts: int = 0  # ``rounds.verdicts`` decides about restarts, and counts them.
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    workers: WorkerConfig = field(default_factory=WorkerConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    rendezvous: RendezvousConfig | None = None
    master_addr: str | None = None
    master_port: int | None = None
    task: ScheduledTask | None = None
    health: HealthPolicy = "refuse"
    dry_run: bool = False
    compile_on_cpu: bool = False

    @property
    def each_node_has_launcher(self) -> bool:
        """Whether this launcher starts one node of several, which meets the others at an endpoint."""
        return self.rendezvous is not None


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(AgentConfig):
    """The settings of one run, in groups. Most names are those of the options, with the unit where there is one.

    ``sets`` of an option's row names its field. Fields of a group that agents get are sent as JSON: numbers, texts,
    None, ``Literal``, tuples, frozensets, dictionaries and dataclasses of these.

    Attributes:
        script: path of the script, name of the module, or program, according to ``entry``.
        script_args: arguments of the script.
        entry: kind of ``script``; ``function`` is set by ``launch``, for a function of the file ``script``.
        text: what workers run: text of the script ``-``, or a function as ``launch`` encodes it; else empty.
        python: interpreter of the script; None: the launcher's.
        chdir: working directory of the workers on every node; None: the launcher's.
        min_nodes: smallest number of nodes of an attempt.
        max_nodes: largest number of nodes of an attempt; further ``hosts`` are spares.
        run_id: name of the run; None: a new one.
        on_exit: shell command that the launcher runs when the run has ended, see ``features.on_exit``.
        hosts: machines on which this launcher starts all nodes.
        remote: connections to other machines, and variables of the workers on all machines.
        local_addr: address for connections from other nodes; None: detected.
        interface: network interface between the nodes; None: detected.
        injections: faults to inject in a dry run, as on the command line: ``kill rank=3 after=5s``.
        slurm_job: the SLURM job that contains this process.
        requeue_on: names of the signals after which SLURM is to requeue that job; they stop the run, too.
        stop_before_end: signal that the workers get before the end of the job, and how many seconds before; None: none.
        check_first: nodes must pass the check before workers start; ``deep``: with the network and the GPUs measured.
        passing_hosts_file: file for the hosts that have passed it; None: none.
        time_limit_s: seconds from the start after which the job ends; None: the scheduler says it.
        job_ends_s: by its scheduler, in seconds since 1970; None: not known. A run with ``stop_before_end`` fills it.
        checkpoint: folder, file or pattern of the job's checkpoints, on the nodes; None: they are not looked at.
        set_aside_bad_checkpoint: rename a checkpoint from which attempts begin and fail.
        wait_for_gpus_s: for so long a run waits for GPUs that nobody uses; None: it does not wait.
        keep_warm_s: seconds for which torch stays imported on each node; 0: use nothing that is left; None: leave none.
        snapshot: copy the code before the run, and run the copy.
        snapshot_include: files and folders that are code, too, though git ignores them.
        sync: copy the code to the hosts, which do not have it, and run it there.
        env: file of which each host makes the Python environment of agents and workers; None: they have theirs.
        env_args: further arguments for uv, which makes it.
        env_wheels: folder with the wheels to install from; None: uv finds them.
        env_dir: folder for environments on each host; None: the default.
        sweep: file with the arguments of many jobs, each a run of its own; None: one run.
        sweep_jobs: further arguments of each of many jobs; empty: one run. A run with ``sweep`` fills it.
        jobs: number of jobs that run at a time; None: as many as fit this machine.
        retry_failed: run only the jobs that have not succeeded before.
        stop_on_failure: end all jobs if one fails.
        code: the snapshot that the workers run, a folder; None: the files themselves. A run with ``snapshot`` fills it.
        begun: in place of the class of the Transport, if a feature has started agents ahead, with its ``run_tag``.
        notices: messages about the configuration, shown at the start.

    Raises:
        UsageError: an invalid value or combination.
    """

    script: str
    script_args: tuple[str, ...] = ()
    entry: Entry = "script"
    text: str = field(default="", repr=False)
    python: str | None = None
    chdir: str | None = None
    min_nodes: int = 1
    max_nodes: int = 1
    run_id: str | None = None
    on_exit: str | None = None
    hosts: tuple[Host, ...] = ()
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    local_addr: str | None = None
    interface: str | None = None
    injections: tuple[str, ...] = ()
    slurm_job: SlurmJob | None = None
    requeue_on: tuple[str, ...] = ()
    stop_before_end: tuple[str, float] | None = None
    check_first: CheckFirst | None = None
    passing_hosts_file: str | None = None
    time_limit_s: float | None = None
    job_ends_s: float | None = None
    checkpoint: str | None = None
    set_aside_bad_checkpoint: bool = False
    wait_for_gpus_s: float | None = None
    keep_warm_s: float | None = None
    snapshot: bool = False
    snapshot_include: tuple[str, ...] = ()
    sync: bool = False
    sweep: str | None = None
    sweep_jobs: tuple[tuple[str, ...], ...] = ()
    jobs: int | None = None
    retry_failed: bool = False
    stop_on_failure: bool = False
    code: str | None = None
    env: str | None = None
    env_args: str | None = None
    env_wheels: str | None = None
    env_dir: str | None = None
    begun: Any = field(default=None, repr=False, compare=False)
    notices: tuple[StartNotice, ...] = ()

    def __post_init__(self) -> None:
        self.workers.validate()
        self.timeouts.validate()
        self._check_values()
        self._check_nodes()

    @property
    def is_local(self) -> bool:
        """Whether all agents of this launcher are its child processes."""
        return self.dry_run or not self.hosts

    @property
    def script_file(self) -> str:
        """Path of the script; empty if workers run a module, a program, a function or a text."""
        return self.script if self.entry == "script" and not self.text else ""

    @property
    def transport(self) -> str:
        """How agents are started: a name in ``transport.transports.TABLE``."""
        return "local" if self.is_local else self.remote.transport

    @property
    def one_launcher_leads(self) -> bool:
        """Whether this launcher leads all nodes: it starts several, or has a spare for one."""
        return (self.max_nodes > 1 or len(self.hosts) > 1) and not self.each_node_has_launcher

    @property
    def has_peers(self) -> bool:
        """Whether the run may have several nodes, whoever starts them."""
        return self.one_launcher_leads or self.each_node_has_launcher

    def _check_values(self) -> None:
        if not self.script:
            message = "no script: give a script, or a module with -m, or a program with --no-python"
            raise UsageError(message, "`ddplaunch --help` shows examples.")
        if self.max_restarts < 0:
            raise OptionError("--max-restarts", self.max_restarts, "must not be negative")
        if self.master_port is not None and not 0 <= self.master_port <= 65535:
            raise OptionError("--master-port", self.master_port, "must be between 0 and 65535")
        if self.keep_warm_s is not None and not 0 <= self.keep_warm_s <= _MAX_KEPT_S:
            raise OptionError("--keep-warm", f"{self.keep_warm_s:g} s", "must be between 0 and 7 days")
        if self.run_id is not None and not is_run_id(self.run_id):
            problem = "use letters, digits and . _ : @ + - (at most 128, no dot first)"
            raise OptionError("--rdzv-id", repr(self.run_id), problem, "It names the log folder.")
        if self.run_id == KEEPER_ID:
            raise OptionError("--rdzv-id", KEEPER_ID, "stands for what --keep-warm has left", "Give another name.")

    def _check_nodes(self) -> None:
        given = f"{self.min_nodes}:{self.max_nodes}" if self.min_nodes < self.max_nodes else self.max_nodes
        if self.one_launcher_leads and not self.dry_run and not self.hosts:
            hint = (
                "Name the hosts with --hosts gpu1,gpu2 or --hostfile FILE, or start ddplaunch on every node, with "
                "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, or with --master-addr HOST --node-rank N. "
                "--dry-run simulates the nodes here."
            )
            raise OptionError("--nnodes", given, "neither hosts nor a rendezvous endpoint is given", hint)
        if self.dry_run and self.max_nodes > _MAX_SIMULATED_NODES:
            problem = f"a dry run has at most {_MAX_SIMULATED_NODES} nodes, since this machine runs all their processes"
            raise OptionError("--nnodes", given, problem)
        if self.hosts and len(self.hosts) < self.min_nodes:
            named = "one host is named" if len(self.hosts) == 1 else f"{len(self.hosts)} hosts are named"
            raise OptionError("--nnodes", given, named, "Name more hosts, or lower --nnodes.")
        of_pings_s = _MIN_LOST_AFTER_S if self.max_nodes > 1 else 0.0
        least_s = _MIN_WITHOUT_HEARTBEAT_S if self.each_node_has_launcher else of_pings_s
        waited_s = self.rendezvous.silent_after_s if self.rendezvous else self.timeouts.lost_after_s
        if waited_s < least_s:
            problem = f"{waited_s:g} s without an answer are too few to count a node as lost (least: {least_s:g} s)"
            raise OptionError("--rdzv-conf", "keep_alive_interval x keep_alive_max_attempt", problem)
