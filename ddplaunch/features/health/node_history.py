"""What earlier runs have found out about nodes: which events are remembered, how long, and which hosts to use last.

Pure: the caller reads the clock and the file. Runs in the launcher at the start and at the end of a run, and in
``--ps --nodes``. Must not blame a node for an error of the program, for a lack of memory, or for a stop by the user.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.field_types import OneLine, Seconds
from ddplaunch.text import grouped, local_time, quote

if TYPE_CHECKING:
    from ddplaunch.protocol.results import AttemptResult, WorkerExit
    from ddplaunch.protocol.run_result import RunResult

KEEP_S = 7 * 86400.0
"""Seconds after which an event is forgotten."""

MAX_EVENTS, MAX_OF_HOST = 2000, 20
"""Events that are kept in all, and of one host; the oldest are forgotten first."""

_UNEXPLAINED_RUNS = 2
"""In so many different runs a node must fail without an explanation before it is used last."""

_MAX_TEXT = 300

_RAISED_FOR_DEVICES = re.compile(r"[\w.]*(Runtime|Accelerator|DistBackend|Dist|System|Cuda|CUDADriver|CudaAPI)Error\b")
"""Exceptions by which libraries report errors of devices; others are raised by programs."""

_DEVICE_ERROR = re.compile(
    r"CUDA (driver )?error|cudaError|\bHIP error|hipError|\bNCCL\b.*\berror|ncclUnhandledCudaError|ncclInternalError"
    r"|cuDNN error|CUDNN_STATUS|CUBLAS_STATUS|uncorrectable|fallen off the bus",
    re.IGNORECASE,
)
"""Messages of a GPU, its driver or NCCL."""

_OF_THE_PROGRAM = re.compile(
    r"out of memory|assert(ion)? triggered|illegal (memory|instruction)|illegal address|misaligned|invalid|bad param"
    r"|no kernel image|not (supported|permitted|compiled)|NOT_SUPPORTED|ALLOC_FAILED|peer access|timed? ?out|timeout",
    re.IGNORECASE,
)
"""In a message of a GPU: the program, its memory or another rank is the likelier cause."""

_SHARED_MEMORY = re.compile(r"shared memory|\bshm\b|No space left", re.IGNORECASE)
"""Explains SIGBUS: /dev/shm is full."""

_DEADLY = {-signal.SIGKILL, -signal.SIGBUS, -signal.SIGSEGV, -signal.SIGILL}

_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9A-Fa-f][0-9A-Za-z/-]{3,}")

EventKind = Literal["hardware", "unexplained"]


@dataclass(frozen=True, kw_only=True)
class NodeEvent:
    """One thing that a run has found out about a node.

    Attributes:
        host: display name of the node in that run.
        kind: ``hardware``: its hardware has a fault; ``unexplained``: it was lost, or a worker failed on it first, by
            something that may be its hardware.
        text: what happened, without the host.
        time_s: by the launcher's wall clock, in seconds since the epoch; only for the expiry and for display.
        uuid: of the GPU, if the event is about one and its UUID is known.
    """

    host: OneLine
    kind: EventKind
    text: OneLine
    time_s: Seconds
    run_id: OneLine
    uuid: OneLine = ""


# What a run has found out.


def of_run(result: RunResult, lost: Mapping[str, str], now_s: float) -> list[NodeEvent]:
    """The events of a run that has ended.

    ``lost`` has the reason for each host whose node was lost before the run was to end.
    """
    events = [*_of_findings(result, now_s), *_of_workers(result, now_s)]
    sick = {event.host for event in events}
    texts = {**_unexplained_of_workers(result), **lost}
    return events + [
        _event(result.run_id, host, "unexplained", text, now_s) for host, text in texts.items() if host not in sick
    ]


def _event(run_id: str, host: str, kind: EventKind, text: str, now_s: float, uuid: str = "") -> NodeEvent:
    return NodeEvent(host=host, kind=kind, text=quote(text, _MAX_TEXT), time_s=now_s, run_id=run_id, uuid=uuid)


def _of_workers(result: RunResult, now_s: float) -> Iterator[NodeEvent]:
    """The hardware faults that have ended workers, one per host and GPU."""
    seen = set()
    for exit_ in _exits(result.attempts):
        uuid = (_UUID.search(exit_.hardware) or [""])[0]
        if exit_.hardware and (exit_.host, uuid) not in seen:
            seen.add((exit_.host, uuid))
            yield _event(result.run_id, exit_.host, "hardware", exit_.hardware, now_s, uuid)


def _exits(attempts: Iterable[AttemptResult]) -> Iterator[WorkerExit]:
    for attempt in attempts:
        yield from (*((attempt.cause,) if attempt.cause else ()), *attempt.exits)


def _of_findings(result: RunResult, now_s: float) -> Iterator[NodeEvent]:
    """GPUs that no job should use. A disk that is full, or the like, is no fault of the hardware."""
    for found in result.health:
        if found.severity == "refuse" and found.gpu is not None:
            yield _event(
                result.run_id, found.host, "hardware", f"GPU {found.gpu}: {found.text}", now_s, uuid=found.uuid
            )


def _unexplained_of_workers(result: RunResult) -> dict[str, str]:
    """By host: how a worker on it failed first, if it may be the node's fault. Empty if it may be the program's."""
    # After a signal of the user, or of a scheduler, a worker may fail because it is being stopped.
    attempts = result.attempts[:-1] if result.signal else result.attempts
    asked = {
        exit_.host: f"rank {exit_.rank} asked to avoid it: {exit_.avoid_node}"
        for exit_ in _exits(result.attempts)
        if exit_.avoid_node
    }
    firsts = [first for attempt in attempts if (first := _first_on_one_host(attempt))]
    texts = {first.host: text for first in firsts if (text := unexplained(first))}
    # One node that is sick fails again and again; a program that crashes does so on any node.
    return {**(texts if len(texts) == 1 else {}), **asked}


def _first_on_one_host(attempt: AttemptResult) -> WorkerExit | None:
    """The first failure of an attempt, unless workers of several nodes failed by themselves."""
    if attempt.outcome != "failed" or attempt.hung:
        return None
    own = [exit_ for exit_ in first_failure.failures(attempt.exits) if not first_failure.is_consequence(exit_)]
    if len({exit_.host for exit_ in own}) > 1:
        return None
    return attempt.cause or (own[0] if own else None)


def unexplained(exit_: WorkerExit) -> str:
    """How a worker failed, if neither the program nor a lack of memory explains it; else empty."""
    if exit_.give_up or exit_.avoid_node or exit_.hardware or first_failure.is_consequence(exit_):
        return ""
    message = exit_.error.message if exit_.error else ""
    if message:
        return _device_error(exit_, message) if _RAISED_FOR_DEVICES.match(message) else ""
    said = "\n".join(exit_.tail)
    if exit_.returncode == -signal.SIGABRT:  # Of a C++ library: what it says is in the last lines.
        return _device_error(exit_, said)
    is_full = exit_.returncode == -signal.SIGBUS and _SHARED_MEMORY.search(said)
    if exit_.returncode not in _DEADLY or exit_.ended_by_stop or exit_.out_of_memory != "no" or is_full:
        return ""
    return f"rank {exit_.rank} {first_failure.ended(exit_.returncode)}"


def _device_error(exit_: WorkerExit, text: str) -> str:
    line = next((line for line in text.splitlines() if _DEVICE_ERROR.search(line)), "")
    return f"rank {exit_.rank}: {line.strip()}" if line and not _OF_THE_PROGRAM.search(text) else ""


# What is kept, and what follows from it.


def kept(events: Iterable[NodeEvent], now_s: float) -> list[NodeEvent]:
    """Those that have not expired, each once per run, the oldest first; at most ``MAX_EVENTS``.

    An event from the future, by a clock that was wrong, expires too.
    """
    unique = {(event.host, event.uuid, event.kind, event.run_id): event for event in events}
    recent = sorted(
        (event for event in unique.values() if abs(now_s - event.time_s) < KEEP_S), key=lambda event: event.time_s
    )
    counts: Counter[str] = Counter()
    newest = []
    for event in reversed(recent):
        counts[event.host] += 1
        if counts[event.host] <= MAX_OF_HOST:
            newest.append(event)
    return newest[:MAX_EVENTS][::-1]


def suspects(events: Iterable[NodeEvent]) -> dict[str, str]:
    """The hosts that should be used last, each with the reason: a sentence's end, with time and run."""
    by_host = grouped((event.host, event) for event in events)
    return {host: reason for host, found in by_host.items() if (reason := _reason(found))}


def _reason(events: Sequence[NodeEvent]) -> str:
    """Of the events of one host, the oldest first; empty if they do not suffice."""
    hardware = [event for event in events if event.kind == "hardware"]
    if hardware:
        return _told(hardware[-1])
    runs = len({event.run_id for event in events})
    if runs < _UNEXPLAINED_RUNS:
        return ""
    return f"failed in {runs} runs without a known cause, last: {_told(events[-1])}"


def _told(event: NodeEvent) -> str:
    gpu = f" ({event.uuid})" if event.uuid and event.uuid not in event.text else ""
    return f"{event.text}{gpu}, {day(event.time_s)} in {event.run_id}"


def day(time_s: float) -> str:
    """Local date and minute of a time in seconds since the epoch."""
    return local_time(time_s, "%Y-%m-%d %H:%M") or "?"
