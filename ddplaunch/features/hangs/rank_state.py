"""What a worker, or a GPU, does while nothing happens, and what that says about the job."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.features.gpus.records import GpuReading
    from ddplaunch.features.hangs.records import RankEvidence

BUSY_CPU_SHARE, BUSY_CPU_S = 0.01, 0.05
"""CPU seconds per second, of one core, and CPU seconds from which a worker computes.

One that sleeps, or waits in gloo, uses less. The second limit is for short windows: the kernel counts in steps of
0.01 s, and an examination costs a little itself."""

STARVED_SHARE = 0.5
"""Seconds per second from which a rank is one that has too little of a CPU. One that waits for other ranks wakes up
seldom, and so waits little for a CPU, however many processes want one."""

BUSY_IO_BYTES_PER_S, BUSY_IO_BYTES = 1024, 64 << 10
"""Bytes per second, and bytes, from which a worker reads or writes. The stacks that it writes for us are less."""

_BLOCKING = re.compile(
    r"init_process_group|destroy_process_group|new_group|new_subgroups\w*|split_group|init_device_mesh"
    r"|(monitored_)?barrier|all_(reduce|gather|to_all)\w*|broadcast\w*|reduce\w*|(all_)?gather\w*|scatter\w*"
    r"|i?(send|recv)\w*|batch_isend_irecv"
)
"""Functions of torch.distributed that wait for other ranks. Others, like the forward pass of FSDP, run the script."""


class RankState(str, enum.Enum):
    """What a rank does. The first state that fits is the state."""

    ENDED = "ended"
    """Its process has ended."""
    MOVING = "moving"
    """It printed something, or called or finished a collective."""
    UNKNOWN = "unknown"
    """It has not been watched for any time."""
    DEBUGGED = "debugged"
    """One of its threads is in a debugger: a person decides when it goes on."""
    BLOCKED = "blocked"
    """The kernel does not run it, for example because a signal suspended it, and its descendants do nothing."""
    WAITING = "waiting"
    """It waits for other ranks. It may use CPU meanwhile: NCCL does."""
    BUSY = "busy"
    """It, or a descendant such as a worker of a DataLoader, computes, reads or writes."""
    INPUT = "input"
    """It reads from standard input."""
    STILL = "still"
    """It does nothing, for another reason: a lock, a sleep, a connection."""


ACTIVE = {RankState.MOVING, RankState.BUSY, RankState.DEBUGGED, RankState.UNKNOWN}
"""States of a rank that does something, or may."""


class JobState(str, enum.Enum):
    """What the ranks of a job do together."""

    MOVING = "moving"
    """A rank moves."""
    STUCK = "stuck"
    """No rank moves, and none is busy or debugged: nothing will happen any more."""
    BUSY = "busy"
    """Ranks wait for others, and some are busy or debugged. Rank 0 evaluates, for example."""
    QUIET = "quiet"
    """No rank waits for others, and some are busy or debugged; or no rank is left."""


def rank_state(evidence: RankEvidence) -> RankState:
    """What the rank does, from the time between its two last samples."""
    uses = is_busy(evidence)
    states = (
        (RankState.ENDED, not evidence.is_running),
        (RankState.MOVING, _moves(evidence)),
        (RankState.UNKNOWN, evidence.window_s <= 0),
        (RankState.DEBUGGED, bool(evidence.debugger)),
        (RankState.BLOCKED, bool(evidence.blocked_state) and not uses),
        (RankState.WAITING, waits(evidence)),
        (RankState.BUSY, uses),
        (RankState.INPUT, evidence.waits_for_input),
    )
    return next((state for state, is_so in states if is_so), RankState.STILL)


def job_state(evidences: Iterable[RankEvidence]) -> JobState:
    """What the ranks do together. A rank of which nothing is known counts as busy: it is no reason for an alarm."""
    states = {rank_state(evidence) for evidence in evidences} - {RankState.ENDED}
    if RankState.MOVING in states:
        return JobState.MOVING
    if not states or states & {RankState.BUSY, RankState.DEBUGGED, RankState.UNKNOWN}:
        return JobState.BUSY if RankState.WAITING in states else JobState.QUIET
    return JobState.STUCK


def is_blocking(function: str) -> bool:
    """Whether this function of torch.distributed waits for other ranks."""
    return bool(_BLOCKING.fullmatch(function))


def _moves(evidence: RankEvidence) -> bool:
    return bool(evidence.collectives_moved) or evidence.silent_s < evidence.window_s


def waits(evidence: RankEvidence) -> bool:
    """Whether the rank waits in a collective, or has called one that is not done."""
    record = evidence.flight_record
    has_unfinished_call = record is not None and bool(record.made.unfinished)
    return has_unfinished_call or (evidence.pending is not None and is_blocking(evidence.pending.function))


def is_busy(evidence: RankEvidence) -> bool:
    """Whether the rank computes, reads or writes, or would if other processes left it a CPU.

    The rank and its descendants have used more CPU time, or have read and written more bytes, than a rank that waits.
    """
    uses_cpu = evidence.cpu_s >= max(BUSY_CPU_S, BUSY_CPU_SHARE * evidence.window_s)
    uses_io = evidence.io_bytes >= max(BUSY_IO_BYTES, BUSY_IO_BYTES_PER_S * evidence.window_s)
    has_no_cpu = evidence.run_queue_wait_s >= STARVED_SHARE * evidence.window_s
    return evidence.window_s > 0 and (uses_cpu or uses_io or has_no_cpu)


# GPUs.

_WORKS_PERCENT = 5
_SPINS_PERCENT, _SPINS_MEMORY_PERCENT, _SPINS_POWER_SHARE = 99, 1, 0.5
"""A kernel that computes for minutes looks like a hang from the CPU's side. A GPU on which NCCL waits is told from it
by its power: its kernel only looks at a variable again and again."""


def spins(gpu: GpuReading) -> bool:
    """Whether the GPU runs a kernel that does nothing, as NCCL's while it waits; false if that is not known."""
    if gpu.utilization is None or gpu.memory_utilization is None or not gpu.power_w or not gpu.power_limit_w:
        return False
    is_idle_inside = gpu.memory_utilization <= _SPINS_MEMORY_PERCENT
    return gpu.utilization >= _SPINS_PERCENT and is_idle_inside and gpu.power_w < _SPINS_POWER_SHARE * gpu.power_limit_w


def works(gpu: GpuReading) -> bool:
    """Whether the GPU computes."""
    return gpu.utilization is not None and gpu.utilization >= _WORKS_PERCENT and not spins(gpu)
