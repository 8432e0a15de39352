"""What agents report: how workers and attempts have ended, and findings about the hardware; and the Round.

Frozen values, which are sent as JSON. ``run_result`` has the result of the whole run.

``*_time_s`` and ``time_s`` are seconds since the epoch, by the clock of the host where the event happened. Other names
in ``*_s`` are durations.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import (
    Count,
    LongText,
    OneLine,
    Pid,
    Port,
    ReturnCode,
    Seconds,
    at_most,
    between,
)

StreamName = Literal["stdout", "stderr"]
Certainty = Literal["no", "perhaps", "yes"]
Outcome = Literal["succeeded", "failed", "stopped"]
"""Of workers, a round or a run. A round that ends only because a node is lost or joins is stopped, too."""

Severity = Literal["refuse", "warn"]
Workers = Annotated[int, between(0, MAX_SLOTS_PER_HOST)]
"""A number of workers of one node."""

NO_RESTARTS_ALLOWED = "not restarted: --max-restarts is 0"
"""The decision after a failure where the user allows no restarts: known to the user, and not shown."""

STACKS_FILE = "stacks.txt"
"""File in the folder of a worker with its Python stacks, if some were written."""

_MAX_SENTENCES = 100
_MAX_TAIL = 1000


@dataclass(frozen=True, kw_only=True)
class Round:
    """One attempt: ranks of this node, and the address of the workers' store.

    Attributes:
        attempt: number of the attempt, and so of its round.
        restart_count: number of restarts before this attempt; the loss or the arrival of a node is none.
        first_rank: rank of this node's first worker.
        has_store: the node of rank 0 serves the workers' store; otherwise the only worker does, if it needs one.
        saved: what the job goes on from, equal on all nodes, as the node of rank 0 says it (``Part.saved``).
    """

    attempt: Count
    restart_count: Count
    node_rank: Count
    nnodes: Count
    first_rank: Count
    local_world_size: Workers
    world_size: Count
    master_addr: OneLine
    master_port: Port
    has_store: bool = True
    saved: LongText | None = None


@dataclass(frozen=True)
class WorkerError:
    """An exception that a worker wrote to its error file. ``time_s`` is the time of that write."""

    message: LongText
    traceback: LongText
    time_s: Seconds


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended.

    Attributes:
        returncode: as in ``subprocess``: the exit code, or minus the number of the signal.
        stopped: ddplaunch stopped the worker, which had raised no exception; not a failure of this worker.
        time_s: time of the exception if the worker recorded one, otherwise of the exit.
        out_of_memory: the kernel sent SIGKILL for lack of memory; ``perhaps``: it killed an unknown process on
            this machine during the attempt.
        ended_by_stop: it had raised an exception, and then a signal of ddplaunch's stop ended it: ``returncode`` is
            not its own.
        tail: last lines of stderr, or of stdout if stderr is empty.
        log_file: the log file to read first; None where no files are kept.
        whereabouts: after a hang or a failed collective: the main thread's Python line, and why it was blocked, if so.
        node_rank: position of the worker's node in the attempt, as in GROUP_RANK.
        stacks: after a hang or a failed collective, from another machine: the end of the worker's ``stacks.txt``.
        hardware: the fault of the node's hardware that has ended the worker, as a sentence; empty if none is known.
        give_up: why the script wants no restart, in its own words; empty if it has not said so.
        avoid_node: why the script wants no further attempt on its node, in its own words; empty if it has not said so.
    """

    rank: Count
    local_rank: Count
    host: OneLine
    pid: Pid
    returncode: ReturnCode
    stopped: bool
    time_s: Seconds
    duration_s: Seconds
    error: WorkerError | None = None
    out_of_memory: Certainty = "no"
    ended_by_stop: bool = False
    tail: Annotated[tuple[LongText, ...], at_most(_MAX_TAIL)] = ()
    log_file: LongText | None = None
    whereabouts: LongText = ""
    node_rank: Count = 0
    stacks: LongText = ""
    hardware: OneLine = ""
    give_up: OneLine = ""
    avoid_node: OneLine = ""


@dataclass(frozen=True)
class RoundEnd:
    """How an attempt has ended, on one node or on all.

    ``cause`` or ``reason`` says why it ended: a failed worker, or a sentence where none has failed. What follows, and
    why, is the ``decision`` of a RoundVerdict.

    Attributes:
        attempt: number of the attempt, and so of its round.
        reason: why it ended, if no worker's failure ended it; empty otherwise.
        cause: the first failure of a worker, possibly on another node; None if none failed. In the AttemptResult of a
            single node it is None: ``exits`` has it.
        hung: workers were stopped because the job hung: by ``hang_timeout_s`` or ``busy_timeout_s`` of ``timeouts``.
        node_leaves: why no further attempt may use a node; empty otherwise.
    """

    attempt: Count
    outcome: Outcome
    reason: LongText = field(default="", kw_only=True)
    cause: WorkerExit | None = field(default=None, kw_only=True)
    hung: bool = field(default=False, kw_only=True)
    node_leaves: OneLine = field(default="", kw_only=True)


@dataclass(frozen=True)
class RoundVerdict(RoundEnd):
    """Coordinator to every node, once all have stopped: how the round ended for all nodes, and what follows it.

    ``node_leaves`` is set if the round failed on a node that is not used again: the attempt that follows is no restart.

    Attributes:
        attempt_follows: another attempt follows.
        restart_follows: that attempt counts as a restart.
        saved_is_suspect: two rounds in a row have begun from the same saved state, and have soon failed.
        decision: what follows, and why, for the user; of a success, that all workers have succeeded. Empty only if the
            coordinator rejects a node that had no part in the round.
    """

    attempt_follows: bool = field(default=False, kw_only=True)
    restart_follows: bool = field(default=False, kw_only=True)
    saved_is_suspect: bool = field(default=False, kw_only=True)
    decision: OneLine = field(default="", kw_only=True)

    @property
    def rejects_node(self) -> bool:
        """Whether it is no verdict on a round: the coordinator rejects the node that gets it, for ``reason``."""
        return not self.decision


@dataclass(frozen=True)
class AttemptResult(RoundVerdict):
    """The end of one attempt, on one node or on all, with the verdict.

    Attributes:
        exits: how the workers ended, by rank; the record of an agent has only those of its node.
        lost_rendezvous: the attempt failed because the rendezvous was lost, so that a later signal is not why it ended.
        restart_count: number of restarts before this attempt; the loss or the arrival of a node is none.
        collectives: where ranks waited, and for whom, if a collective failed; sentences. The launcher adds them. Not
            what ``RunResult.collectives`` has: both are named by their key in report.json.
        world_size: number of the workers of all nodes; ``exits`` has fewer if a node was lost, or has its own launcher.
    """

    exits: Annotated[tuple[WorkerExit, ...], at_most(MAX_SLOTS_PER_HOST)]
    duration_s: Seconds
    lost_rendezvous: bool = False
    restart_count: Count = 0
    collectives: Annotated[tuple[OneLine, ...], at_most(_MAX_SENTENCES)] = ()
    world_size: Count = 0


# What is wrong with a node.


@dataclass(frozen=True, kw_only=True)
class HealthFinding:
    """One thing that is wrong with a node, or with one of its GPUs.

    An agent sends one, while workers run, when something has happened to the hardware. The launcher adds what only it
    knows: ``host``, ``time_s`` and ``ranks``.

    Attributes:
        time_s: when the launcher learned of it.
        rule: fixed name of the rule, for files and tests, like ``row-remap-failed`` or ``xid-79``.
        text: what is wrong, without host and GPU: ``a row of its memory could not be remapped``.
        action: what the user or the administrator can do; empty if there is nothing.
        severity: ``refuse``: no job should use the node; ``warn``: a job may run.
        is_fault: a worker of this GPU (or of this node) that fails within a minute has failed because of it.
        gpu: NVML's index of the GPU, or that of the driver of another vendor; None: the node.
        uuid: the GPU's UUID; empty if it has none.
        local_ranks: local ranks of the workers that use the GPU; empty for a finding about the node.
        ranks: their ranks; empty before the first attempt.
    """

    host: OneLine = ""
    time_s: Seconds = 0.0
    rule: OneLine
    text: OneLine
    action: OneLine = ""
    severity: Severity = "warn"
    is_fault: bool = False
    gpu: Count | None = None
    uuid: OneLine = ""
    local_ranks: Annotated[tuple[Count, ...], at_most(1 << 12)] = ()
    ranks: Annotated[tuple[Count, ...], at_most(1 << 12)] = ()
