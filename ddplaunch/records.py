"""What the processes of a run say to each other: one JSON line each (``protocol``), values from ``model``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddplaunch import logs
from ddplaunch.config import Meeting, Rehearsal
from ddplaunch.hang import EndHung, WorkersAre
from ddplaunch.harm import Inflict, Inflicted
from ddplaunch.model import AgentSpec, AttemptResult, NodesExpected, StreamName
from ddplaunch.node_check import NodeLook, NodesReached, TimeTold
from ddplaunch.remains import RunsFound

# Records from the agent.


@dataclass(frozen=True)
class AgentReady:
    """The agent has read its spec and knows how many workers it will run."""

    pid: int
    local_world_size: int


@dataclass(frozen=True)
class AttemptStarted:
    """All of a node's workers of an attempt run. ``pids`` is ordered by local rank; the first has ``first_rank``."""

    attempt: int
    world_size: int
    master_addr: str
    master_port: int
    pids: tuple[int, ...]
    node_rank: int
    first_rank: int


@dataclass(frozen=True)
class AttemptEnded:
    """All workers of an attempt are gone, and so is all they started."""

    result: AttemptResult


@dataclass(frozen=True)
class AgentSignalled:
    """Somebody sent ``signum`` to the agent; one that ends processes has it stop its workers already."""

    signum: int


@dataclass(frozen=True)
class Output:
    """Header of ``nbytes`` raw bytes that follow it: whole lines of one stream, or its unfinished last line.

    ``lost_lines`` lines before these bytes could not be kept for the console.
    """

    host: str
    rank: int
    local_rank: int
    stream: StreamName
    nbytes: int
    lost_lines: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class Pong:
    """The agent's answer to a Ping, by its main loop."""


@dataclass(frozen=True)
class Notice:
    """Something the user should know; ``level`` -1 always, 0 unless quiet, 1 only if verbose."""

    text: str
    level: Literal[-1, 0, 1] = 0


@dataclass(frozen=True)
class EndpointOpen:
    """The node that was told to serve the rendezvous of ``token`` does; ``addresses`` of its own, best first."""

    token: str
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class RendezvousGone:
    """This node has lost the rendezvous of ``token``, stops its workers, and waits for another Meet."""

    token: str
    reason: str


@dataclass(frozen=True)
class AgentFailed:
    """The agent cannot go on; the fields are LaunchError's."""

    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True)
class AgentEnded:
    """All is told but the logs, if they are wanted; ``left`` lists the pids the agent could not end."""

    left: tuple[int, ...] = ()


# Records to the agent.


@dataclass(frozen=True)
class Meet:
    """Where the nodes of this run meet from now on; an earlier place is gone."""

    meeting: Meeting


@dataclass(frozen=True)
class Ping:
    """The launcher is there. If none has come for ``lost_after_s``, its machine or the network is gone."""

    lost_after_s: float


@dataclass(frozen=True)
class StopWorkers:
    """End the job: send ``signum`` to every worker's process group, SIGKILL after ``grace_s``.

    May be repeated with a shorter grace.
    """

    signum: int
    grace_s: float


@dataclass(frozen=True)
class SweepRun:
    """In place of an AgentSpec: end every process of run ``run_id`` on this node but ``spare``; its agent is lost."""

    run_id: str
    spare: tuple[int, ...]


@dataclass(frozen=True)
class PassSignal:
    """Send ``signum`` to every worker and stop nothing."""

    signum: int


# Records between the agent and its forkserver.


@dataclass(frozen=True, kw_only=True)
class ForkserverSpec:
    """What the forkserver prepares.

    Attributes:
        imports: import torch, so that workers can be forked; else nothing, and it only forks and execs.
        preload: more modules to import once, in order.
        script: whose text tells which parts of torch to import as well; empty for none.
        script_dir: what ``sys.path[0]`` will be in the workers, so that it is that during the imports too.
    """

    run_id: str
    agent_pid: int
    imports: bool
    preload: tuple[str, ...]
    script: str
    script_dir: str


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One process to start; three descriptors (stdin, stdout, stderr) travel with it.

    Attributes:
        tag: chosen by the asker, returned in the answer.
        argv: for ``how="exec"`` the command; else ``sys.argv`` as ``python -u`` would get it, script or module first.
        how: ``script``/``module`` runs in a fork of the forkserver, ``exec`` replaces it, ``store`` serves the
            workers' c10d store on the fourth descriptor, ``member`` is the node's member of the rendezvous.
        env: the complete environment; None keeps the forkserver's.
        cpus: CPU set to run on; None for no change.
        rehearsal: GPUs are rehearsed in a forked worker; an exec'd one has it on its command line.
        cgroup: folder of a cgroup v2 to enter before anything else; empty for none.
    """

    tag: str
    how: Literal["script", "module", "exec", "store", "member"]
    argv: tuple[str, ...] = ()
    env: dict[str, str] | None = None
    cpus: frozenset[int] | None = None
    cgroup: str = ""
    rehearsal: Rehearsal | None = None


@dataclass(frozen=True)
class ForkserverReady:
    """The imports are done. ``refusal`` says why workers must not be forked from it; empty if they may."""

    refusal: str = ""


@dataclass(frozen=True)
class ImportFailed:
    """The forkserver could not import ``module``."""

    module: str
    error: str


@dataclass(frozen=True)
class WorkerStarted:
    """The process for ``tag`` runs as ``pid`` and is the agent's child. ``error`` if it could not be forked."""

    tag: str
    pid: int = 0
    error: str = ""


FROM_AGENT = (
    AgentReady,
    EndpointOpen,
    AttemptStarted,
    AttemptEnded,
    RendezvousGone,
    Inflicted,
    RunsFound,
    NodeLook,
    NodesReached,
    TimeTold,
    Output,
    Pong,
    Notice,
    WorkersAre,
    AgentSignalled,
    AgentFailed,
    AgentEnded,
    *logs.FROM_AGENT,
)
TO_AGENT = (AgentSpec, SweepRun, Ping, Meet, NodesExpected, StopWorkers, PassSignal, EndHung, Inflict, logs.LogsWanted)
FROM_FORKSERVER = (ForkserverReady, ImportFailed, WorkerStarted)
