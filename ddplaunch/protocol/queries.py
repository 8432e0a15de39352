"""Records of ``--check``, ``--ps``, ``--kill`` and ``--stacks``: queries to agents that run no job, and their answers.

The launcher sends InspectNode or ListRuns in place of an AgentSpec. No behaviour belongs here.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from ddplaunch.features.health.records import NodeHealth
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.control import Answer, Request
from ddplaunch.protocol.field_types import Count, OneLine, Pid, Pids, Port, Seconds, Size, between
from ddplaunch.protocol.specs import Program

ProcessKind = Literal["launcher", "agent", "forkserver", "store", "member", "worker", "keeper", "other"]
PROCESS_KINDS: tuple[ProcessKind, ...] = get_args(ProcessKind)
"""Kinds of processes of a run, in the order of reports."""


# --ps, --kill and --stacks.


@dataclass(frozen=True)
class ListRuns:
    """Launcher to agent: requests RunsFound, this user's runs on the machine. EndRun or AskLaunchers may follow."""


ENDING_EXTRA_S = 15.0
"""Seconds after the grace period in which launcher and agents kill workers and collect logs."""


@dataclass(frozen=True)
class EndRun:
    """Launcher to agent: end all runs with this run id or run tag; answered by AgentEnded.

    SIGTERM, then SIGKILL after ``grace_s`` seconds; for a launcher and agents ``ENDING_EXTRA_S`` later.
    """

    run_id: str
    grace_s: Seconds


@dataclass(frozen=True)
class AskLaunchers:
    """Launcher to agent: make ``request`` to the launchers on this machine with this run id or run tag.

    Answered by LaunchersAnswered, after at most ``control.ANSWER_S``. The agent sets the run tag in the request.
    """

    run_id: str
    request: Request


@dataclass(frozen=True)
class LauncherAnswer:
    """What the launcher ``pid`` has answered; ``problem`` says why there is no answer."""

    pid: Pid
    answer: Answer | None = None
    problem: OneLine = ""


@dataclass(frozen=True)
class LaunchersAnswered:
    """Agent to launcher, in answer to AskLaunchers: one answer for each launcher."""

    answers: tuple[LauncherAnswer, ...]


@dataclass(frozen=True, kw_only=True)
class RunOnHost:
    """The processes of one run on one machine.

    Attributes:
        run_tag: the run tag, without the node's number.
        run_id: that of the tag, or another on which the nodes have agreed.
        counts: number of processes of each kind, as pairs.
        age_s: age of the oldest process.
        memory_bytes: proportional set size: shared pages count once.
        launcher_alive: the launcher runs here, or is connected to an agent here.
        script: script, module or program of the workers; empty if it is not known here.
    """

    run_tag: OneLine
    run_id: OneLine
    counts: tuple[tuple[ProcessKind, Count], ...]
    age_s: Seconds
    memory_bytes: Size
    launcher_alive: bool
    script: OneLine = ""


@dataclass(frozen=True)
class RunsFound:
    """Agent to launcher, in answer to ListRuns.

    Attributes:
        machine: equal for two names of one machine (or container), different for all others.
        hidden_pids: processes of this user that this user may not inspect.
    """

    machine: OneLine
    runs: tuple[RunOnHost, ...]
    hidden_pids: Pids = ()


# --check.


_FileLimit = Annotated[int, between(-1, 1 << 60)]


@dataclass(frozen=True)
class InspectNode:
    """Launcher to agent: requests a NodeReport. GetTime and ConnectToNodes may follow.

    Attributes:
        has_peers: other nodes connect to this one; if not, its workers use loopback.
        local_addr: the address at which other nodes connect to this one, if the user gave it.
        interface: the network interface with that address, if the user gave it.
        program: what the workers of a job would run; it is only looked for.
        looks_at_health: NodeReport has the health of the node.
        log_dir: value of ``--log-dir``; None: the default folder.
        gpus: value of ``--gpus``; None: all GPUs that the environment makes visible.
    """

    has_peers: bool
    local_addr: str | None = None
    interface: str | None = None
    program: Program | None = None
    looks_at_health: bool = False
    log_dir: str | None = None
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True)
class GpuUser:
    """A process that has GPUs open; ``gpus`` are their indices."""

    pid: Pid
    name: OneLine
    gpus: tuple[Count, ...]


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """Agent to launcher, in answer to InspectNode.

    Attributes:
        cuda: version of CUDA that torch was built for, or ``ROCm`` and its version; empty for none.
        gpus: models by index; empty text for an unknown model.
        gpu_users: processes with open GPUs, as far as this user may see them.
        shm_free_bytes: free space in /dev/shm; None if it does not exist.
        open_files: soft and hard limit; -1 for none.
        name: the name that the reverse DNS look-up of ``address`` gave; empty if it has none.
        name_s: seconds that this look-up took; every client of a TCPStore makes one.
        addresses: addresses at which this node listens at ``port``, best first.
        health: None if it was not asked for.
    """

    python: OneLine
    torch: OneLine
    cuda: OneLine
    gpus: tuple[OneLine, ...]
    gpu_users: tuple[GpuUser, ...]
    shm_free_bytes: Size | None
    open_files: tuple[_FileLimit, _FileLimit]
    address: OneLine
    name: OneLine
    name_s: Seconds
    addresses: tuple[OneLine, ...]
    port: Port
    health: NodeHealth | None = None


@dataclass(frozen=True)
class GetTime:
    """Launcher to agent: requests a NodeTime."""


@dataclass(frozen=True)
class NodeTime:
    """Agent to launcher, in answer to GetTime: the node's clock, in seconds since the epoch."""

    time_s: Seconds


@dataclass(frozen=True)
class ListeningNode:
    """A node that listens at ``port`` of each of ``addresses``."""

    host: str
    addresses: tuple[str, ...]
    port: Port


@dataclass(frozen=True)
class ConnectToNodes:
    """Launcher to agent: connect to each of ``nodes``; answered by ConnectResults."""

    nodes: tuple[ListeningNode, ...]


@dataclass(frozen=True)
class ConnectResults:
    """Agent to launcher, in answer to ConnectToNodes. ``failed``: hosts without a connection, each with the reason."""

    failed: tuple[tuple[OneLine, OneLine], ...]


FROM_AGENT = (RunsFound, LaunchersAnswered, NodeReport, ConnectResults, NodeTime)
