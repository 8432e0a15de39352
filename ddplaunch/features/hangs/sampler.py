"""Samples of workers: what the kernel has counted, and what torch's flight record says.

Runs in a daemon thread of the agent, because a worker may take seconds to answer. Must not signal or reap a process.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.features.hangs import flight_record
from ddplaunch.features.hangs import worker_records as examination
from ddplaunch.features.hangs.examiner import ANSWER_S
from ddplaunch.features.hangs.rank_state import BUSY_CPU_SHARE
from ddplaunch.features.hangs.records import FlightRecord, PendingCall
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system import process_activity, tcp_bytes
from ddplaunch.system.process_activity import ProcessActivity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.features.hangs.examiner import Answer, Examiner
    from ddplaunch.system.tcp_bytes import Connection

_MAX_MISSING_CHARS = 300
MAX_NAME = 100
_MAX_RANK = 1 << 24


@dataclass(frozen=True)
class Sample:
    """One worker at one moment.

    Attributes:
        at: ``time.monotonic()``.
        answers_cpu_s: CPU seconds that the worker has used for its answers so far.
        status: torch's counters of collectives, to be compared only; empty if it was not asked or did not answer.
        flight_record: only where ``status`` had not changed, or where it was required; that of an earlier sample if
            the worker has called nothing and used no CPU since then.
        missing_sources: what could not be asked, and why.
    """

    pid: int
    at: float
    activity: ProcessActivity
    answers_cpu_s: float = 0.0
    status: bytes = b""
    flight_record: FlightRecord | None = None
    pending: PendingCall | None = None
    waits_for_input: bool = False
    blocked_state: str = ""
    missing_sources: tuple[str, ...] = field(default=())


def take(
    examiner: Examiner,
    pids: Mapping[int, int],
    earlier: Mapping[int, Sample],
    *,
    reads_all: bool,
    answer_s: float = ANSWER_S,
) -> dict[int, Sample]:
    """Sample the workers ``pids`` (by local rank).

    The whole flight record is read only if no collective was called or finished since the ``earlier`` sample, or with
    ``reads_all``: it takes up to 0.2 s of a worker's time. A worker that does not answer within ``answer_s`` seconds to
    one of both questions lacks that source.
    """
    statuses = examiner.ask(pids.values(), examination.STATUS, answer_s)
    before = {pid: earlier[local_rank] for local_rank, pid in pids.items() if local_rank in earlier}
    unchanged = {
        pid: before[pid] for pid, status in statuses.items() if pid in before and _is_same(before[pid], pid, status)
    }
    kept = {} if reads_all else {pid: sample for pid, sample in unchanged.items() if _still_holds(sample)}
    asked = (statuses if reads_all else unchanged).keys() - kept.keys()
    records = examiner.ask(asked, examination.RECORD, answer_s) if asked else {}
    connections = tcp_bytes.by_inode()
    return {
        local_rank: _sample(examiner, pid, connections, statuses.get(pid), records.get(pid), kept.get(pid))
        for local_rank, pid in pids.items()
    }


def _is_same(sample: Sample, pid: int, status: Answer) -> bool:
    return sample.pid == pid and sample.status == status.record


def _still_holds(sample: Sample) -> bool:
    """Whether the worker's flight record is known, and it cannot have called send or recv since then."""
    if sample.flight_record is None:
        return False
    used_s = process_activity.read(sample.pid).cpu_since(sample.activity)
    return used_s < BUSY_CPU_SHARE * (time.monotonic() - sample.at)


def _sample(
    examiner: Examiner,
    pid: int,
    connections: dict[int, Connection],
    status: Answer | None,
    answer: Answer | None,
    kept: Sample | None,
) -> Sample:
    record, missing = kept.flight_record if kept else None, _missing_status(examiner, pid, status)
    if answer and answer.record:
        try:
            record = flight_record.parse(answer.record, groups(answer))
        except ValueError as error:
            missing = f"torch's flight record: {error}"[:_MAX_MISSING_CHARS]
    return Sample(
        pid=pid,
        at=time.monotonic(),
        activity=process_activity.read(pid, connections),
        answers_cpu_s=_answers_cpu_s(pid, status, answer),
        status=status.record if status else b"",
        flight_record=record,
        pending=pending(answer) if answer else kept.pending if kept else None,
        waits_for_input=process_activity.waits_for_input(pid),
        blocked_state=process_activity.blocked_state(pid),
        missing_sources=(missing,) if missing else (),
    )


def _answers_cpu_s(pid: int, *answers: Answer | None) -> float:
    """Also of a thread that tries in vain to answer: while it waits for the GIL, it asks for it 200 times a second."""
    told = [cpu_s(answer) for answer in answers if answer]
    return max(told) if told else process_activity.thread_cpu_s(pid, examination.THREAD_NAME)


def _missing_status(examiner: Examiner, pid: int, status: Answer | None) -> str:
    if not examiner.is_connected(pid):
        return "torch's flight record: the worker has created no process group with ddplaunch's bootstrap"
    if status is None:
        return "torch's flight record: the worker does not answer; it is suspended, or its main thread holds the GIL"
    return "" if status.record else "torch's flight record: this torch has none"


def cpu_s(answer: Answer) -> float:
    """CPU seconds that the worker has used for its answers so far; 0 if it does not tell."""
    value = _facts(answer).get(examination.CPU_S)
    return value if isinstance(value, float) else 0.0


def _facts(answer: Answer) -> dict[str, object]:
    with contextlib.suppress(ValueError, RecursionError):
        facts = json.loads(answer.facts)
        if isinstance(facts, dict):
            return facts
    return {}


def groups(answer: Answer) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name of each process group of the worker -> description and ranks; what does not fit is left out."""
    found = _facts(answer).get(examination.GROUPS)
    known = {}
    for name, group in found.items() if isinstance(found, dict) else ():
        with contextlib.suppress(ValueError, TypeError):
            description, ranks = group
            if isinstance(description, str) and all(type(rank) is int for rank in ranks):
                known[name] = (description, tuple(ranks))
    return known


def pending(answer: Answer) -> PendingCall | None:
    """The function of torch.distributed in which the worker's main thread is."""
    found = _facts(answer).get(examination.PENDING)
    if not isinstance(found, list) or len(found) != 3:
        return None
    function, peer, group = found
    is_rank = type(peer) is int and 0 <= peer < _MAX_RANK
    if not isinstance(function, str) or not isinstance(group, str) or not f"{function}{group}".isprintable():
        return None
    return PendingCall(function[:MAX_NAME], peer if is_rank else None, group[:MAX_NAME])
