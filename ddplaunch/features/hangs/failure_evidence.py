"""What the workers of a failed attempt know of their collectives: who waited for whom.

Runs in the agent, main thread only; a short-lived thread asks the workers that still run. A worker that has failed has
left its record in a file: ``examination.RECORD_FILE``, or torch's own where its watchdog has ended the worker. Must not
interpret the records: the launcher has those of all nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.agent.workers.exit_details import read_error_file
from ddplaunch.features.hangs import flight_record, sampler
from ddplaunch.features.hangs import worker_records as examination
from ddplaunch.features.hangs.examiner import Answer
from ddplaunch.features.hangs.records import FlightRecord, RankEvidence
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import environment, first_failure, stack_dump
from ddplaunch.system.files import kept_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ddplaunch.agent.events import Wait
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.examiner import Examiner
    from ddplaunch.features.hangs.records import PendingCall
    from ddplaunch.protocol.results import WorkerExit

_TIMED_OUT_S, _FAILED_S, _ELSEWHERE_S = 0.5, 0.02, 0.3
"""How long the stop waits for answers: after a collective has timed out or aborted the process; after another failure,
which the page can explain without them; where another node has failed. With a short flight record a worker answers in
1 ms, with a full one in 0.1 s."""

_AT_END_S = 0.02
"""Once all workers have ended, no answer is awaited: the thread that has asked ends at once."""

_MAX_CALLS = 16
"""Newest calls that are sent: all workers of a large job fail together."""


@dataclass(frozen=True)
class WorkersAsked:
    """Event, which ends a wait: a thread has asked the workers of a failed attempt."""


class FailureEvidence:
    """Evidence of one attempt, which ends because of a failure, or because another node is lost."""

    def __init__(self, group: WorkerGroup, examiner: Examiner, post: Callable[[object], None]) -> None:
        """``examiner`` asks the workers of ``group``; ``post`` posts an event to this agent, from any thread."""
        self._group, self._examiner, self._post = group, examiner, post
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
            self._group.request_stacks(resume=False)
        has_asked = threading.Event()

        def ask() -> None:
            # What a worker answers while it is being stopped also counts; the end of a worker ends its answer.
            by_pid = self._examiner.ask(pids.values(), examination.RECORD, max(limit_s, _TIMED_OUT_S))
            self._answers = {local_rank: by_pid[pid] for local_rank, pid in pids.items() if pid in by_pid}
            has_asked.set()
            self._post(WorkersAsked())

        thread = threading.Thread(target=ask, name="failure", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # No room for a thread: the stop does not wait.
            return
        self._thread, end_s = thread, time.monotonic() + limit_s
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
        found = (
            tuple(map(self._of_worker, self._group.workers, exits)) if len(exits) == len(self._group.workers) else ()
        )
        return found if any(each.flight_record or each.pending for each in found) else ()

    def _of_worker(self, worker: Worker, exit_: WorkerExit) -> RankEvidence:
        record, pending = _left(worker) if exit_.returncode else (None, None)
        answer = self._answers.get(worker.local_rank)
        was_running = answer is not None or (self._was_asked and exit_.stopped)
        if answer and not record and not pending:
            record, pending = _record_of(answer), sampler.pending(answer)
        line = stack_dump.raised_at(exit_.error.traceback) if exit_.error else ""
        return RankEvidence(
            rank=worker.rank,
            local_rank=worker.local_rank,
            host=self._group.host,
            pid=worker.pid,
            is_running=was_running,
            blocked_state=worker.blocked_state if was_running else "",
            where=(line or stack_dump.whereabouts("".join(worker.stacks[-1:])))[: sampler.MAX_NAME],
            pending=pending,
            flight_record=record and _shortened(record),
        )


def _has_timed_out(worker: Worker) -> bool:
    with contextlib.suppress(OSError):
        error = read_error_file(worker.error_file) if worker.error_file else None
        message = error.message if error else ""
        return first_failure.is_peer_loss(message) and first_failure.is_timeout(message)
    return False


def _torch_file(worker: Worker) -> Path | None:
    return worker.worker_dir and worker.worker_dir / f"{environment.FLIGHT_RECORD_FILE}{worker.rank}"


def _left(worker: Worker) -> tuple[FlightRecord | None, PendingCall | None]:
    """What a worker that has failed has left in its files."""
    if not worker.worker_dir:
        return None, None
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, AttributeError):
        found = json.loads(_read(worker.worker_dir / examination.RECORD_FILE))
        record = json.dumps(found.pop(examination.FLIGHT_RECORD, None)).encode()
        answer = Answer(json.dumps(found).encode(), record)
        pending, parsed = sampler.pending(answer), _record_of(answer)
        return parsed and flight_record.with_failed_call(parsed, pending.group if pending else ""), pending
    path = _torch_file(worker)
    with contextlib.suppress(OSError, ValueError):
        return flight_record.parse_file(_read(path)) if path else None, None
    return None, None


def _read(path: Path) -> bytes:
    """A regular file's begin, one byte more than a flight record may have."""
    with kept_files.open_regular(path, os.O_NOFOLLOW) as file:
        return file.read(flight_record.MAX_DUMP_BYTES + 1)


def _record_of(answer: Answer) -> FlightRecord | None:
    with contextlib.suppress(ValueError):
        return flight_record.parse(answer.record, sampler.groups(answer))
    return None


def _shortened(record: FlightRecord) -> FlightRecord:
    unfinished = [call for call in record.calls if not call.is_done][:_MAX_CALLS]
    kept = {id(call) for call in (*unfinished, *record.calls[-_MAX_CALLS:])}
    return replace(record, calls=tuple(call for call in record.calls if id(call) in kept))
