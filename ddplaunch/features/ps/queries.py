"""Queries of ``--ps`` and ``--kill`` to an agent without a run, and its answers. No behaviour belongs here."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from ddplaunch.features.free_gpus.records import GpuUser
from ddplaunch.features.gpus.records import MAX_GPUS, Gpu
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.control import Answer, Request, RequestRefused
from ddplaunch.protocol.field_types import Count, OneLine, Pid, Pids, Seconds, Size, at_most

ProcessKind = Literal["launcher", "agent", "forkserver", "store", "member", "relay", "worker", "keeper", "other"]
PROCESS_KINDS: tuple[ProcessKind, ...] = get_args(ProcessKind)
"""Kinds of processes of a run, in the order of reports."""


@dataclass(frozen=True)
class ListRuns:
    """Launcher to agent: requests RunsFound, this user's runs on the machine."""


ENDING_EXTRA_S = 15.0
"""Seconds after the grace period in which launcher and agents kill workers and collect logs."""


@dataclass(frozen=True)
class EndRun:
    """Launcher to agent: end all runs with this run id or run tag; answered by AgentEnded.

    SIGTERM, then SIGKILL after ``grace_s`` seconds; for a launcher and agents ``ENDING_EXTRA_S`` later.
    """

    run_id: str
    grace_s: Seconds


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
        launchers: pids of the run's launchers.
        waits: it has no workers yet, since it waits for GPUs.
    """

    run_tag: OneLine
    run_id: OneLine
    counts: Annotated[tuple[tuple[ProcessKind, Count], ...], at_most(len(PROCESS_KINDS))]
    age_s: Seconds
    memory_bytes: Size
    launcher_alive: bool
    script: OneLine = ""
    launchers: Pids = ()
    waits: bool = False


@dataclass(frozen=True)
class RunsFound:
    """Agent to launcher, in answer to ListRuns.

    Attributes:
        machine: equal for two names of one machine (or container), different for all others.
        hidden_pids: processes of this user that this user may not inspect.
    """

    machine: OneLine
    runs: Annotated[tuple[RunOnHost, ...], at_most(1 << 16)]
    hidden_pids: Pids = ()


@dataclass(frozen=True)
class AskLaunchers:
    """Launcher to agent: make ``request`` to launchers on this machine, each a pid and a run tag.

    Answered by LaunchersAnswered, after at most ``control.ANSWER_S``. The agent sets the run tag in the request.
    """

    launchers: tuple[tuple[Pid, OneLine], ...]
    request: Request


@dataclass(frozen=True)
class LaunchersAnswered:
    """Agent to launcher, in answer to AskLaunchers: what the launcher of each pid has answered, or why it has not."""

    answers: Annotated[tuple[tuple[Pid, Answer | RequestRefused], ...], at_most(1 << 16)]


@dataclass(frozen=True)
class ListGpus:
    """Launcher to agent: requests GpusFound, the GPUs of the machine and the runs of all users that use them."""


@dataclass(frozen=True, kw_only=True)
class GpuOnHost(Gpu):
    """A GPU, and what the driver says of its use.

    Attributes:
        key: as in ``GpuUser.gpus``.
        in_use: why no other run should use it; empty if it is free for the driver.
    """

    key: OneLine
    used_bytes: Size = 0
    in_use: OneLine = ""


@dataclass(frozen=True)
class GpusFound:
    """Agent to launcher, in answer to ListGpus.

    Attributes:
        machine: as in RunsFound.
        users: the runs that use GPUs or wait for some, as the register of the machine has them.
        problem: why the driver or the register says nothing; empty if both do.
    """

    machine: OneLine
    gpus: Annotated[tuple[GpuOnHost, ...], at_most(MAX_GPUS)]
    users: Annotated[tuple[GpuUser, ...], at_most(1 << 12)]
    problem: OneLine = ""


TO_AGENT = {
    ListRuns: "run_finder",
    EndRun: "run_finder",
    AskLaunchers: "ask_launchers",
    ListGpus: "gpu_finder",
}
FROM_AGENT = (RunsFound, LaunchersAnswered, GpusFound)
