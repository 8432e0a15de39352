"""What is known of this node's workers: samples of them, and the evidence that is made of those or that they leave.

Runs in the agent. ``take_samples`` is called in a daemon thread, because a worker may take seconds to answer; a
short-lived thread asks the workers that still run when an attempt fails; all else is in the main thread. A worker that
has failed has left its record in a file: ``worker_records.RECORD_FILE``, or torch's own where its watchdog has ended
the worker. Must not signal or reap a process, nor interpret the records: the launcher has those of all nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent.workers.exit_details import read_error_file
from ddplaunch.features.hangs import flight_record, process_activity, stack_dumps, worker_records
from ddplaunch.features.hangs.examiner import ANSWER_S, MAX_NAME, Answer, Examiner
from ddplaunch.features.hangs.process_activity import Connections, ProcessActivity
from ddplaunch.features.hangs.rank_state import BUSY_CPU_SHARE
from ddplaunch.features.hangs.records import MAX_STACK_CHARS, MAX_UNANSWERED, FlightRecord, PendingCall, RankEvidence
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import environment, first_failure
from ddplaunch.system import procfs
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote
from ddplaunch.threads import in_thread, start_work

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.agent.rendezvous import Wait
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.stack_dumps import StackDumps
    from ddplaunch.protocol.results import WorkerExit

_MAX_MISSING_CHARS = 300
_NO_STACKS = ("Python stacks: the worker has written none; it is suspended, or not started by ddplaunch",)


@dataclass(frozen=True)
class Sample:
    """One worker at one moment.

    Attributes:
        answers_cpu_s: CPU seconds that the worker has used for its answers so far.
        status: torch's counters of collectives, to be compared only; empty if it was not asked or did not answer.
        flight_record: only where ``status`` had not changed, or where it was required; that of an earlier sample if
            the worker has called nothing and used no CPU since then.
        missing_sources: what could not be asked, and why.
    """

    activity: ProcessActivity
    answers_cpu_s: float = 0.0
    status: bytes = b""
    flight_record: FlightRecord | None = None
    pending: PendingCall | None = None
    waits_for_input: bool = False
    blocked_state: str = ""
    missing_sources: tuple[str, ...] = field(default=())


def take_samples(
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
    statuses = examiner.ask(pids.values(), worker_records.STATUS, answer_s)
    before = {sample.activity.pid: sample for sample in earlier.values()}
    unchanged = {
        pid: before[pid] for pid, status in statuses.items() if pid in before and before[pid].status == status.record
    }
    kept = {} if reads_all else {pid: sample for pid, sample in unchanged.items() if _still_holds(sample)}
    asked = (statuses if reads_all else unchanged).keys() - kept.keys()
    records = examiner.ask(asked, worker_records.RECORD, answer_s) if asked else {}
    connections = process_activity.tcp_connections()
    return {
        local_rank: _sample(examiner, pid, connections, statuses.get(pid), records.get(pid), kept.get(pid))
        for local_rank, pid in pids.items()
    }


def _still_holds(sample: Sample) -> bool:
    """Whether the worker's flight record is known, and it cannot have called send or recv since then."""
    if sample.flight_record is None:
        return False
    now = process_activity.read(sample.activity.pid, {})
    return now.cpu_since(sample.activity) < BUSY_CPU_SHARE * (now.at - sample.activity.at)


def _sample(
    examiner: Examiner,
    pid: int,
    connections: Connections,
    status: Answer | None,
    answer: Answer | None,
    kept: Sample | None,
) -> Sample:
    record, missing = kept.flight_record if kept else None, _missing_status(examiner, pid, status)
    if answer and answer.record:
        try:
            record = flight_record.parse(answer.record, answer.groups)
        except ValueError as error:
            missing = f"torch's flight record: {error}"[:_MAX_MISSING_CHARS]
    return Sample(
        activity=process_activity.read(pid, connections),
        answers_cpu_s=_answers_cpu_s(pid, status, answer),
        status=status.record if status else b"",
        flight_record=record,
        pending=answer.pending if answer else kept.pending if kept else None,
        waits_for_input=process_activity.waits_for_input(pid),
        blocked_state=procfs.blocked_state(pid),
        missing_sources=(missing,) if missing else (),
    )


def _answers_cpu_s(pid: int, *answers: Answer | None) -> float:
    """Also of a thread that tries in vain to answer: while it waits for the GIL, it asks for it 200 times a second."""
    told = [answer.cpu_s for answer in answers if answer]
    return max(told) if told else process_activity.thread_cpu_s(pid, worker_records.THREAD_NAME)


def _missing_status(examiner: Examiner, pid: int, status: Answer | None) -> str:
    if not examiner.is_connected(pid):
        return "torch's flight record: the worker has created no process group with ddplaunch's bootstrap"
    if status is None:
        return "torch's flight record: the worker does not answer; it is suspended, or its main thread holds the GIL"
    return "" if status.record else "torch's flight record: this torch has none"


# Evidence of an examination.


def of_group(
    group: WorkerGroup,
    samples: Mapping[int, Sample],
    earlier: Mapping[int, Sample],
    stacks: Sequence[StackDumps] | None = None,
) -> Iterator[RankEvidence]:
    """Evidence of each worker, by local rank. Without an ``earlier`` sample of a worker, nothing of it has moved.

    ``stacks``: the workers' dumps, by local rank, if they were asked for some.
    """
    for worker in group.workers:
        sample = samples.get(worker.local_rank)
        if not worker.is_running or sample is None or sample.activity.pid != worker.pid:
            yield RankEvidence(
                rank=worker.rank, local_rank=worker.local_rank, host=group.host, pid=worker.pid, is_running=False
            )
        else:
            dumps = stacks[worker.local_rank].texts[-1:] if stacks is not None else None
            yield _of_worker(group.host, worker, sample, earlier.get(worker.local_rank), dumps)


def _of_worker(
    host: str, worker: Worker, sample: Sample, earlier: Sample | None, dumps: tuple[str, ...] | None
) -> RankEvidence:
    """``dumps``: the last one, if there is any; None if the worker was not asked for one."""
    if earlier is None or earlier.activity.pid != sample.activity.pid:
        earlier = sample
    missing_stacks = _NO_STACKS if dumps == () else ()
    dumps = dumps or ()
    activity, before = sample.activity, earlier.activity
    written_at = max([worker.started_at, *(stream.written_s for stream in worker.streams)])
    return RankEvidence(
        rank=worker.rank,
        local_rank=worker.local_rank,
        host=host,
        pid=worker.pid,
        silent_s=max(0.0, time.monotonic() - written_at),
        window_s=activity.at - before.at,
        cpu_s=max(0.0, activity.cpu_since(before) - max(0.0, sample.answers_cpu_s - earlier.answers_cpu_s)),
        io_bytes=activity.io_since(before),
        run_queue_wait_s=activity.waited_since(before),
        collectives_moved=sample.status != earlier.status if sample.status and earlier.status else None,
        blocked_state=sample.blocked_state,
        where=quote(stack_dumps.whereabouts(dumps[-1]), MAX_NAME) if dumps else "",
        stacks=dumps[-1][-MAX_STACK_CHARS:] if dumps else "",
        waits_for_input=sample.waits_for_input,
        debugger=stack_dumps.debugger(dumps[-1]) if dumps else "",
        pending=sample.pending,
        flight_record=sample.flight_record,
        busy_child=_busy_child(sample, earlier),
        unanswered=activity.unanswered[:MAX_UNANSWERED],
        missing_sources=(*sample.missing_sources, *missing_stacks),
    )


def _busy_child(sample: Sample, earlier: Sample) -> str:
    pid = sample.activity.busiest_child(earlier.activity)
    if pid is None:
        return ""
    name = procfs.read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip()[:MAX_NAME]
    return f"{name if name.isprintable() else 'a child'} (pid {pid})"


# Of a failed attempt.

_TIMED_OUT_S, _FAILED_S, _ELSEWHERE_S = 0.5, 0.02, 0.3
"""How long the stop waits for answers: after a collective has timed out or aborted the process; after another failure,
which the page can explain without them; where another node has failed. With a short flight record a worker answers in
1 ms, with a full one in 0.1 s."""

_AT_END_S = 0.02
"""Once all workers have ended, no answer is awaited: the thread that has asked ends at once."""

_MAX_CALLS = 16
"""Newest calls that are sent: all workers of a large job fail together."""


class FailureEvidence:
    """Evidence of one attempt, which ends because of a failure, or because another node is lost."""

    def __init__(
        self,
        group: WorkerGroup,
        stacks: Sequence[StackDumps],
        examiner: Examiner,
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        """``stacks`` are those of ``group``, which ``examiner`` asks; ``post`` has the main thread call a function."""
        self._group, self._stacks, self._examiner, self._post = group, stacks, examiner, post
        self._answers: dict[int, Answer] = {}
        self._thread: threading.Thread | None = None
        self._was_asked = False

    def take(self, wait: Wait) -> None:
        """Ask the workers that still run, before they are stopped."""
        pids = self._group.pids_by_local_rank()
        limit_s = self._limit_s()
        if not any(self._examiner.is_connected(pid) for pid in pids.values()):
            return
        self._was_asked = True
        if limit_s > _FAILED_S:  # The lines of the script matter where a rank has not come.
            stack_dumps.request(self._stacks)
        has_asked = threading.Event()

        def ask() -> None:
            # What a worker answers while it is being stopped also counts; the end of a worker ends its answer.
            by_pid = self._examiner.ask(pids.values(), worker_records.RECORD, max(limit_s, _TIMED_OUT_S))
            self._answers = {local_rank: by_pid[pid] for local_rank, pid in pids.items() if pid in by_pid}
            self._post(has_asked.set)

        try:
            self._thread = in_thread("failure", ask)
        except RuntimeError:  # No room for a thread: the stop does not wait.
            return
        end_s = time.monotonic() + limit_s
        wait(lambda: has_asked.is_set() or self._group.all_ended, lambda: end_s)

    def _limit_s(self) -> float:
        ended = [worker for worker in self._group.workers if worker.returncode]
        if not ended:
            return _ELSEWHERE_S
        is_aborted = any(worker.returncode == -signal.SIGABRT for worker in ended)  # By gloo, or by torch's watchdog.
        return _TIMED_OUT_S if is_aborted or any(map(_has_timed_out, ended)) else _FAILED_S

    def of_workers(self, exits: Sequence[WorkerExit]) -> tuple[RankEvidence, ...]:
        """Evidence of all workers, which have ended as ``exits``; empty if none has left any."""
        if self._thread:
            self._thread.join(_AT_END_S)
        if len(exits) != len(self._group.workers):
            return ()
        records = _torch_records([self._group.workers[i] for i, exit_ in enumerate(exits) if exit_.returncode])
        found = tuple(self._of_worker(*each, records) for each in zip(self._group.workers, exits, strict=True))
        return found if any(each.flight_record or each.pending for each in found) else ()

    def _of_worker(self, worker: Worker, exit_: WorkerExit, records: Mapping[int, FlightRecord | None]) -> RankEvidence:
        """``records``: what ``_torch_records`` returns."""
        record, pending = _left(worker) if exit_.returncode else (None, None)
        record = record or (None if pending else records.get(worker.rank))
        answer = self._answers.get(worker.local_rank)
        was_running = answer is not None or (self._was_asked and exit_.stopped)
        if answer and not record and not pending:
            record, pending = _record_of(answer), answer.pending
        stacks = self._stacks[worker.local_rank]
        line = first_failure.raised_at(exit_.error.traceback) if exit_.error else ""
        return RankEvidence(
            rank=worker.rank,
            local_rank=worker.local_rank,
            host=self._group.host,
            pid=worker.pid,
            is_running=was_running,
            blocked_state=stacks.blocked_state if was_running else "",
            where=quote(line or stack_dumps.whereabouts("".join(stacks.texts[-1:])), MAX_NAME),
            pending=pending,
            flight_record=record and flight_record.shortened(record, _MAX_CALLS),
        )


def _has_timed_out(worker: Worker) -> bool:
    with contextlib.suppress(OSError):
        error = read_error_file(worker.error_file) if worker.error_file else None
        message = error.message if error else ""
        return first_failure.is_peer_loss(message) and bool(re.search(r"timed? ?out", message, re.IGNORECASE))
    return False


def _torch_records(workers: Sequence[Worker]) -> dict[int, FlightRecord | None]:
    """By rank, what torch has left in a file where its watchdog has ended the worker. All are read at once."""
    paths = {
        worker.rank: worker.worker_dir / f"{environment.FLIGHT_RECORD_FILE}{worker.rank}"
        for worker in workers
        if worker.worker_dir
    }
    deadline = time.monotonic() + flight_record.FILE_S
    reads = {
        rank: start_work("flight record", partial(_torch_record, path), None)
        for rank, path in paths.items()
        if os.path.exists(path)
    }
    return {rank: read(deadline) for rank, read in reads.items()}


def _torch_record(path: Path) -> FlightRecord | None:
    with contextlib.suppress(OSError, ValueError):
        return flight_record.parse_file(path)
    return None


def _left(worker: Worker) -> tuple[FlightRecord | None, PendingCall | None]:
    """What a worker that has failed by an exception has left in its file."""
    if not worker.worker_dir:
        return None, None
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, AttributeError):
        found = flight_record.document(_read(worker.worker_dir / worker_records.RECORD_FILE))
        record = json.dumps(found.pop(worker_records.FLIGHT_RECORD, None)).encode()
        answer = Answer(found, record)
        pending = answer.pending
        return _record_of(answer, pending.group if pending else ""), pending
    return None, None


def _read(path: Path) -> bytes:
    """A regular file's begin, one byte more than a flight record may have."""
    with kept_files.open_regular(path, os.O_NOFOLLOW) as file:
        return file.read(flight_record.MAX_DUMP_BYTES + 1)


def _record_of(answer: Answer, raised_in: str | None = None) -> FlightRecord | None:
    with contextlib.suppress(ValueError):
        return flight_record.parse(answer.record, answer.groups, raised_in)
    return None
