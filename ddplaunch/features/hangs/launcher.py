"""Notices that a job stands still, has its workers examined, and reports or ends it.

Runs in the launcher, in the main thread; what takes seconds, to explain and to write, in other threads. Agents report
for how long their workers have been quiet (``WorkerActivity``); if all of them have for a limit of ``TimeoutConfig``,
the launcher asks for evidence (``ExamineWorkers``), and only that decides: a job of which anything moves is never
called stuck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ddplaunch.cluster.hosts import fold
from ddplaunch.errors import Level
from ddplaunch.features.hangs.examinations import EXAMINATION_S, Examination, RequestedExaminations, tell
from ddplaunch.features.hangs.last_states import LastStates
from ddplaunch.features.hangs.rank_state import JobState
from ddplaunch.features.hangs.records import AbortHungAttempt, ExamineWorkers, WorkerActivity, WorkersExamined
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AttemptEnded, Report
from ddplaunch.text import duration, quote
from ddplaunch.threads import post_from_thread
from ddplaunch.timeouts import AUTO_HANG_REPORT_S

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.features.hangs.explanation import Explanation

    _Explained = tuple[Explanation, Explanation | None]
    """What the job does; and, if ranks wait while others write output, who waits for whom all the same."""

_T = TypeVar("_T")
_LOAD_S = 1.0
"""After it, what explains a hang is imported: a short run does without, and a file system may hang later."""

_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_JUDGE_S = 0.5
"""After a judgement the next one follows no sooner: each passes over all nodes, and so many may report at once."""

_PAUSES = 10
"""The automatic limit is this many times the longest pause so far."""

_QUIET_S = 60.0
"""Without output and collectives for so long, a job is called quiet in events.jsonl."""


class HangWatch(Watch):
    """Watches one run.

    Attributes:
        is_concluding: all answers to an examination have come, and a thread explains or writes them.
    """

    def __init__(self, run: RunServices) -> None:
        self._timeouts, self._folder, self._messages = run.config.timeouts, run.folder, run.messages
        self._send, self._post, self._note = run.send_to_all, run.post, run.note
        self.is_concluding = False
        self._load_at = time.monotonic() + _LOAD_S
        self._attempt = -1
        self._participants: Sequence[int] = ()
        self._activity: dict[int, WorkerActivity] = {}
        self._quiet_since: dict[int, float] = {}
        """Of each node, by the wall clock; and of the job, as it is in events.jsonl."""
        self._noted_since: float | None = None
        self._active: set[int] = set()
        """The nodes whose last report said that they are active."""
        self._longest_pause_s = self._longest_wait_s = 0.0
        self._examination: Examination | None = None
        self._count = 0
        self._reported: JobState | None = None
        self._waiting_s, self._has_waiting = 0.0, False
        self._is_wait_known = self._is_wait_reported = False
        """Whether the user has been told that ranks wait since then; whether for the reason that others only write."""
        self._judged_at, self._judge_at = 0.0, NEVER  # When the reports were judged last, and are judged next.
        self._examine_from = 0.0  # The next examination begins no sooner.

    # Events.

    def on_event(self, index: int, event: object) -> None:
        """The attempt has ended on a node, and so on all: an agent waits for the verdict first."""
        if isinstance(event, AttemptEnded):
            self._note_active()

    def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
        """Node ``node_index`` reports on its workers; ``participants`` are all nodes of the attempt."""
        self._participants = participants
        match report:
            case WorkerActivity():
                self._on_activity(node_index, report)
            case WorkersExamined() if (asked := self._examination) and asked.take(node_index, participants, report):
                self._conclude(asked, time.monotonic())

    def _on_activity(self, index: int, event: WorkerActivity) -> None:
        if event.attempt > self._attempt:
            self._start_attempt(event.attempt)
        if event.attempt < self._attempt:
            return
        if event.quiet_s or event.is_finished:
            self._active.discard(index)
        else:
            self._note_active()
            if self._reported or not self._active:  # Otherwise the job was active before.
                self._on_active()
            self._active.add(index)
        self._activity[index] = event
        self._judge_soon()
        self._quiet_since[index] = time.time() - event.quiet_s
        if event.waiting_s < self._waiting_s and not event.is_finished:
            self._on_waiting()

    def _start_attempt(self, attempt: int) -> None:
        self._note_active()
        self._attempt, self._activity, self._examination, self._reported = attempt, {}, None, None
        self._active, self._judge_at = set(), NEVER
        self._waiting_s, self._is_wait_known, self._is_wait_reported = 0.0, False, False

    def _on_active(self) -> None:
        quiet_s, still_s = self._job_quiet_s()
        self._longest_pause_s = max(self._longest_pause_s, still_s)
        if self._reported:
            self._show_moves_again(quiet_s)

    def _show_moves_again(self, quiet_s: float) -> None:
        self._messages.show(f"the job moves again, after {duration(quiet_s)}", Level.ALWAYS, "moves_again")
        self._reported = None

    def _note_quiet(self) -> None:
        """The job has been quiet for long, or the user is told that it hangs; it may have moved or ended meanwhile."""
        if self._noted_since is None and self._job_quiet_s()[0]:
            self._noted_since = max(self._quiet_since[index] for index in self._running())
            self._note("quiet", "", self._noted_since, attempt=self._attempt)

    def _note_active(self) -> None:
        since, self._noted_since, now_s = self._noted_since, None, time.time()
        if since is not None:
            self._note("active", "", now_s, attempt=self._attempt, s=round(now_s - since, 3))

    def _on_waiting(self) -> None:
        """Ranks wait in a collective, or they go on; whatever the others write."""
        running = self._running().values()
        if not running:
            self._has_waiting = False
            return
        waiting_s, before_s = min(each.waiting_s for each in running), self._waiting_s
        if waiting_s < before_s:
            self._longest_wait_s = max(self._longest_wait_s, before_s)
            if self._is_wait_reported:
                text = f"collectives are called and finished again, after {duration(before_s)}"
                self._messages.show(text, Level.ALWAYS, "moves_again")
            self._is_wait_reported = self._is_wait_known = False
        self._waiting_s, self._has_waiting = waiting_s, any(each.has_waiting for each in running)

    # Limits.

    @property
    def _report_s(self) -> float:
        return self._limit_s(self._longest_pause_s)

    def _limit_s(self, longest_s: float) -> float:
        limit = self._timeouts.hang_report_s
        if limit == "auto":
            return max(AUTO_HANG_REPORT_S, _PAUSES * longest_s)
        return NEVER if limit is None else limit

    def _job_quiet_s(self) -> tuple[float, float]:
        """Seconds for which the whole job has been quiet, and still; 0 if a node is active or has not reported."""
        known = self._running().values()
        if not known or any(not event.quiet_s for event in known):
            return 0.0, 0.0
        # A report is repeated while it holds: what has happened since the last one is not known yet.
        return min(event.quiet_s for event in known), min(event.still_s for event in known)

    def _running(self) -> dict[int, WorkerActivity]:
        """The last reports of all nodes whose workers run; empty if one has not reported."""
        if any(index not in self._activity for index in self._participants):
            return {}
        reports = {index: self._activity[index] for index in self._participants}
        return {index: report for index, report in reports.items() if not report.is_finished}

    def _is_wait_due(self, quiet_s: float) -> bool:
        """Whether ranks wait for so long, while others write output, that the user should know it."""
        is_new = self._has_waiting and not quiet_s and not self._is_wait_known
        return is_new and self._waiting_s >= self._limit_s(self._longest_wait_s)

    def _is_due(self, quiet_s: float, still_s: float) -> bool:
        timeouts = self._timeouts
        limits = (
            (still_s, timeouts.hang_timeout_s),
            (quiet_s, timeouts.busy_timeout_s),
            (quiet_s, None if self._reported else self._report_s),
            (still_s, None if self._reported is JobState.STUCK else self._report_s),
        )
        return self._is_wait_due(quiet_s) or any(limit is not None and reached >= limit for reached, limit in limits)

    def run_due(self, now: float) -> float:
        """Begin or end an examination if it is time. Returns when to call again."""
        if now >= self._load_at:
            from ddplaunch.features.hangs import explanation  # noqa: F401

            self._load_at = NEVER
        return min(self._load_at, self._examine_if_due(now))

    def _examine_if_due(self, now: float) -> float:
        if self._examination:
            if now >= self._examination.deadline:
                self._conclude(self._examination, now)
            return self._examination.deadline if self._examination else NEVER
        if self.is_concluding:
            return NEVER  # The end of the thread ends the wait.
        return self._judge(now) if now >= self._judge_at else self._judge_at

    def _judge_soon(self) -> None:
        self._judge_at = min(self._judge_at, self._judged_at + _JUDGE_S)

    def _judge(self, now: float) -> float:
        """Begin an examination if the reports of the nodes say so, and enough time has passed since the last one."""
        self._judged_at, self._judge_at = now, NEVER
        self._on_waiting()
        quiet_s, still_s = self._job_quiet_s()
        if quiet_s >= _QUIET_S:
            self._note_quiet()
        if self._is_due(quiet_s, still_s):
            if now >= self._examine_from:
                self._examine(now, quiet_s, still_s)
                return now + EXAMINATION_S
            self._judge_at = self._examine_from
        return self._judge_at

    # Examinations.

    def _examine(self, now: float, quiet_s: float, still_s: float) -> None:
        self._count += 1
        self._examination = Examination(
            number=self._count,
            attempt=self._attempt,
            deadline=now + EXAMINATION_S,
            expected=set(self._running()),
            quiet_s=quiet_s,
            still_s=still_s,
            waiting_s=self._waiting_s,
        )
        self._send(ExamineWorkers(self._attempt, self._count))

    def _conclude(self, examination: Examination, now: float) -> None:
        """All nodes have answered, or their time is over: explain, decide what follows, write, and tell it."""
        self._examination, self.is_concluding = None, True
        pause_s = max(examination.quiet_s / 4, examination.waiting_s / 4, _MIN_PAUSE_S)
        self._examine_from = now + min(pause_s, _MAX_PAUSE_S)
        is_wait_due = self._is_wait_due(examination.quiet_s)
        self._in_thread(partial(_explained, examination, is_wait_due=is_wait_due), partial(self._decide, examination))

    def _in_thread(self, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Call ``work`` in a thread, and ``then`` with what it returns in the main thread; not if ``work`` fails."""
        post_from_thread("hang", lambda: partial(then, work()), self._post, self._end_conclusion)

    def _end_conclusion(self) -> None:
        self.is_concluding = False
        self._judge_soon()

    def _decide(self, examination: Examination, explained: _Explained) -> None:
        """What follows from what has been found: a report, the end of the attempt, or nothing."""
        found, in_spite_of_output = explained
        tell: Callable[[Path | None], None] | None = None
        if examination.attempt != self._attempt:
            pass
        elif self._job_quiet_s()[0] and (reason := self._reason_to_abort(examination, found)):
            tell = partial(self._abort, found, reason)
        elif self._job_quiet_s()[0] and self._is_new(found, examination):
            tell = partial(self._report_hang, examination, found, self._first_line(examination, found))
        elif in_spite_of_output and self._is_wait_due(examination.quiet_s) and not examination.missing:
            found, tell = in_spite_of_output, partial(self._report_wait, examination, in_spite_of_output)
        if tell is None:
            self._end_conclusion()
        else:
            work = partial(examination.write, self._folder(), found)
            self._in_thread(work, partial(self._on_written, examination.attempt, tell))

    def _on_written(self, attempt: int, tell: Callable[[Path | None], None], path: Path | None) -> None:
        """Only now tell it, or end the attempt."""
        self._end_conclusion()
        if attempt == self._attempt:
            tell(path)

    def _reason_to_abort(self, examination: Examination, found: Explanation) -> str:
        if examination.missing:  # An agent that does not answer may have workers that move.
            return ""
        hang_s, busy_s = self._timeouts.hang_timeout_s, self._timeouts.busy_timeout_s
        if found.job_state is JobState.STUCK and hang_s is not None and examination.still_s >= hang_s:
            return f"nothing has moved for {duration(examination.still_s)}: the job hangs"
        if found.job_state is not JobState.MOVING and busy_s is not None and examination.quiet_s >= busy_s:
            return f"no output and no collective for {duration(examination.quiet_s)} (--busy-timeout)"
        return ""

    def _is_new(self, found: Explanation, examination: Examination) -> bool:
        """Whether the user does not know it yet: one report for each pause, and one more if a busy job gets stuck."""
        is_hang = found.job_state in (JobState.STUCK, JobState.BUSY)
        if not is_hang or (found.job_state is JobState.BUSY and self._is_wait_reported):
            return False
        reached_s = examination.still_s if found.job_state is JobState.STUCK else examination.quiet_s
        return self._reported not in (found.job_state, JobState.STUCK) and reached_s >= self._report_s

    def _abort(self, found: Explanation, reason: str, _: Path | None) -> None:
        if not self._job_quiet_s()[0]:  # It has moved meanwhile.
            return
        explained = "".join(f"; {sentence}" for sentence in found.sentences[:1])
        self._note_quiet()
        self._note("hang_aborted", f"{reason}{explained}")
        self._send(AbortHungAttempt(self._attempt, f"{reason}{explained}"))

    def _first_line(self, examination: Examination, found: Explanation) -> str:
        silence = f"no output and no collective for {duration(examination.quiet_s)}"
        if examination.missing:
            hosts = quote(fold(self._activity[index].host for index in examination.missing))
            silence += f", and no answer from {hosts} for {EXAMINATION_S:.0f} s"
            return f"{silence}: the job may hang; of the other nodes:"
        if found.job_state is JobState.STUCK:
            return f"nothing has moved for {duration(examination.still_s)}: the job seems to hang"
        return f"{silence}, while some ranks compute"

    def _report_hang(self, examination: Examination, found: Explanation, first: str, path: Path | None) -> None:
        self._reported = JobState.BUSY if examination.missing else found.job_state
        self._is_wait_known = True
        self._note_quiet()
        self._report(found, first, path)
        if not self._job_quiet_s()[0]:
            self._show_moves_again(examination.quiet_s)

    def _report_wait(self, examination: Examination, found: Explanation, path: Path | None) -> None:
        """Ranks wait in a collective for others that go on writing output."""
        self._is_wait_known = self._is_wait_reported = True
        since = f"no collective was called or finished for {duration(examination.waiting_s)}"
        said = "ranks wait in one while others write output, as in a long evaluation or an endless loop"
        self._report(found, f"{since}: {said}", path)

    def _report(self, found: Explanation, first: str, path: Path | None) -> None:
        tell(self._messages, found, f"{first}{f'; all stacks: {path}' if path else ''}", Level.ALWAYS, "hang_reported")


def _explained(examination: Examination, *, is_wait_due: bool) -> _Explained:
    found = examination.explained()
    busy = examination.explained(output_counts=False) if is_wait_due else None
    return found, busy if busy and busy.job_state is JobState.BUSY else None


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    return HangWatch(run), RequestedExaminations(run), LastStates(run)
