"""Measures for how long the workers of this node have done nothing, and examines them when the launcher asks.

Runs in the agent, main thread only; the threads of the streams tell of new output, and a thread takes the samples. Must
not decide that the job hangs: the launcher decides, from the reports of all nodes.

Cost: two samples a minute, which take a worker 0.1 ms, while workers that have a process group write output. After
``_FIRST_SAMPLE_S`` without any, one more. What samples need is imported after ``_LOAD_S``: a short run does without it,
and a file system that hangs later has no effect.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent.workers.exit_details import AttemptFailure
from ddplaunch.features.hangs import stack_dumps
from ddplaunch.features.hangs.examiner import ANSWER_S
from ddplaunch.features.hangs.records import AbortHungAttempt, ExamineWorkers, WorkerActivity, WorkersExamined
from ddplaunch.mailbox import NEVER
from ddplaunch.threads import begin, post_from_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddplaunch.agent.parts import NodeServices
    from ddplaunch.agent.rendezvous import Wait
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.evidence import Sample
    from ddplaunch.features.hangs.examiner import Examiner
    from ddplaunch.features.hangs.rank_state import RankState
    from ddplaunch.features.hangs.records import NodeEvidence, RankEvidence
    from ddplaunch.features.hangs.stack_dumps import StackDumps

_SUSPENDED_S = 2.0
"""If a timer fires this much too late, this process was suspended meanwhile."""

_LOAD_S = 1.0
_FIRST_SAMPLE_S = 10.0
_MAX_PERIOD_S = 30.0
_MIN_PERIOD_S = 0.5
_STACKS_APART_S = 2.0
_QUIET_AT_STOP_S = 10.0
"""After so long a job may seem to hang to the user who stops it."""

_NODE_S = 6.0
"""How long NCCL and the GPUs may take to answer in an examination."""

_STOP_EXAMINATION_S, _STOP_NODE_S, _STOP_ANSWER_S = 0.5, 0.4, 0.15
"""How long a stop waits for the examination, and that for NCCL and the GPUs, and for a worker's answer to each of two
questions."""


class ActivityWatch:
    """Watches the workers of one attempt. ``is_hung``: the launcher has found that the job hangs."""

    def __init__(
        self,
        node: NodeServices,
        group: WorkerGroup,
        stacks: Sequence[StackDumps],
        examiner: Examiner,
        ask_node: Callable[[float], NodeEvidence],
    ) -> None:
        """The watch begins with ``begin``.

        Args:
            node: the agent, and its time limits.
            group: the workers of the attempt.
            stacks: theirs, by local rank.
            examiner: asks the workers for their flight records.
            ask_node: asks NCCL and the GPUs; blocks for up to the given number of seconds.
        """
        self.is_hung = False
        self._limits = node.spec.timeouts.hang_limits
        shortest = min(self._limits, default=NEVER)
        self._first_sample_s = min(shortest / 10, _FIRST_SAMPLE_S) if self._limits else NEVER
        self._period_s = min(max(shortest / 6, _MIN_PERIOD_S), _MAX_PERIOD_S)
        self._group, self._stacks, self._examiner, self._node_evidence = group, stacks, examiner, ask_node
        self._send, self._post, self._to_own_launcher = node.report, node.post, node.outbox.send
        self._deadline = self._progress_at = self._busy_at = self._sampled_at = 0.0
        self._collective_at: float | None = None  # None: not known.
        self._samples: dict[int, Sample] = {}
        self._node: NodeEvidence | None = None
        self._active_samples: dict[int, Sample] = {}
        """The samples when a worker last moved or was busy: whoever does little is seen over a longer time."""
        self._is_sampling = self._is_sampling_all = False
        self._is_watching = self._is_reported = False
        self._is_finished = self._is_waiting_reported = False
        self._asked: list[ExamineWorkers] = []  # Not begun yet.
        self._examining: list[ExamineWorkers] = []  # Answered by the next sample of all sources.
        self._second_stacks_at = NEVER

    def begin(self) -> None:
        """The workers run."""
        now = time.monotonic()
        self._restart_clocks(now)
        self._sampled_at = now
        self._deadline = now + min(_LOAD_S, self._first_sample_s)
        self._is_watching = True

    def run_due(self, now: float) -> float:
        """Do what is due at ``now``. Returns when to call again at the latest, or infinity."""
        if not self._is_watching:
            return NEVER
        if self._is_reported and self._group.debugged:
            self._on_active()
        if now >= min(self._deadline, self._second_stacks_at):
            self._on_deadline(now)
        return min(self._deadline, self._second_stacks_at)

    def end(self, wait: Wait) -> None:
        """The attempt ends. If the job hangs, ``wait`` until its workers have written their Python stacks."""
        self._is_watching, self._is_finished = False, True
        self._refuse(self._examining + self._asked)
        if self._limits:
            self._send(WorkerActivity(self._group.attempt, is_finished=True))
        if self.is_hung:
            stack_dumps.request(self._stacks, resume=True)
            end_s = time.monotonic() + stack_dumps.DUMP_S
            wait(lambda: self._group.all_ended, lambda: end_s)

    @property
    def delays_stop(self) -> bool:
        """Whether ``examine_before_stop`` comes before the stop: the attempt runs, and its workers are quiet."""
        return not self._is_finished and self._is_quiet

    @property
    def _is_quiet(self) -> bool:
        quiet_s = time.monotonic() - self._last_progress()
        return bool(self._limits) and quiet_s >= min(_QUIET_AT_STOP_S, *self._limits)

    def examine_before_stop(self, wait: Wait) -> None:
        """If the workers have been quiet for long, send the launcher what they do, in at most ``_STOP_EXAMINATION_S``.

        Call it before the workers are stopped: the user may stop the job because it seems to hang. The wait ends when
        all workers have ended, as after a second signal of the user.
        """
        if not self._is_quiet:
            return
        stack_dumps.request(self._stacks)
        self._is_finished, self._examining = False, []
        self._asked = []
        taken_before = self._samples
        self._take_sample(reads_all=True, node_s=_STOP_NODE_S, answer_s=_STOP_ANSWER_S)
        end_s = time.monotonic() + _STOP_EXAMINATION_S
        if wait(lambda: self._samples is not taken_before or self._group.all_ended, lambda: end_s):
            self._answer([ExamineWorkers(self._group.attempt, 0)], taken_before, self._node)
        self._is_finished = True

    def handle_event(self, event: ExamineWorkers | AbortHungAttempt) -> AttemptFailure | None:
        """Handle an event; returns the attempt's failure if the job hangs.

        Events of an earlier attempt, and all events after ``end``, are ignored.
        """
        if event.attempt != self._group.attempt or self._is_finished:
            self._refuse([event] if isinstance(event, ExamineWorkers) else [])
            return None
        match event:
            case AbortHungAttempt(reason=reason):
                self.is_hung = True
                return AttemptFailure(reason, hung=True)
            case ExamineWorkers():
                self._asked.append(event)
                self._begin_examination()
        return None

    def _begin_examination(self) -> None:
        """Examine the workers for all questions that wait, unless an examination goes on.

        Two stacks and two samples, ``_STACKS_APART_S`` apart. What the limits ask about is compared with the last
        sample; for a request that may be hours old.
        """
        if self._examining or not self._asked:
            return
        self._examining, self._asked = self._asked, []
        stack_dumps.request(self._stacks)
        self._second_stacks_at = time.monotonic() + _STACKS_APART_S
        if any(order.is_requested for order in self._examining):
            self._take_sample(reads_all=False)

    # Clocks.

    def _restart_clocks(self, now: float) -> None:
        self._progress_at = self._busy_at = now
        self._collective_at = now if self._collective_at else None

    def _last_progress(self) -> float:
        written = (stream.written_s for stream in self._group.streams)
        return max([self._progress_at, self._last_debugged(), *written])

    def _last_debugged(self) -> float:
        """Until when ranks waited for the user of a debugger, not for each other."""
        return time.monotonic() if self._group.debugged else self._group.debugged_at

    def _on_deadline(self, now: float) -> None:
        if now >= self._second_stacks_at:
            self._second_stacks_at = NEVER
            if not self._is_sampling:
                stack_dumps.request(self._stacks)
                self._take_sample(reads_all=True)
            return
        if self._examining:
            self._deadline = NEVER
            return
        _load()
        if now - self._deadline > _SUSPENDED_S:  # The whole job was suspended, including its workers.
            self._restart_clocks(now)
        for stream in self._group.streams:  # Set before the check: output that arrives during it is also posted.
            stream.on_next_output = self._on_output if self._is_reported else None
        quiet_s = now - self._last_progress()
        if quiet_s >= self._first_sample_s or (now >= self._sampled_at + self._period_s and self._can_be_asked()):
            self._take_sample(reads_all=False)
        else:
            self._deadline = now - quiet_s + self._first_sample_s

    def _can_be_asked(self) -> bool:
        return any(map(self._examiner.is_connected, self._group.pids_by_local_rank().values()))

    def _take_sample(self, *, reads_all: bool, node_s: float = _NODE_S, answer_s: float = ANSWER_S) -> None:
        """Sample in a thread; the deadlines go on when it has ended."""
        self._deadline = NEVER
        if self._is_sampling:
            return
        self._is_sampling, self._is_sampling_all = True, reads_all
        pids, earlier = self._group.pids_by_local_rank(), self._samples

        def sampled() -> Callable[[], None]:
            from ddplaunch.features.hangs import evidence

            node = begin("node", lambda: self._node_evidence(node_s) if reads_all else None, None)
            samples = evidence.take_samples(self._examiner, pids, earlier, reads_all=reads_all, answer_s=answer_s)
            return partial(self._on_sampled, samples, node(time.monotonic() + node_s))

        # Without room for a thread it is as if nothing were known of the workers.
        post_from_thread("sampler", sampled, self._post, lambda: self._on_sampled({}, None))

    def _on_sampled(self, samples: dict[int, Sample], node: NodeEvidence | None) -> None:
        """The workers that ran are sampled, by local rank. ``node`` is None if only they were."""
        if self._is_finished:
            return
        self._is_sampling = False
        previous, self._samples, self._node = self._samples, samples, node
        now = time.monotonic()
        self._sampled_at = now
        earlier = self._move_clocks(now, previous)
        self._move_collective_clock(now, previous)
        if self._is_sampling_all:
            self._answer(self._examining, earlier, node)
            self._examining = []
        quiet_s, still_s = self._quiet_and_still_s(now)
        if quiet_s >= self._first_sample_s:
            self._report(quiet_s, still_s, now)
        else:
            self._on_active()
            self._report_waiting(now)
        self._deadline = now + self._time_to_next(quiet_s, still_s)
        if self._examining:
            self._second_stacks_at = now + _STACKS_APART_S
        self._begin_examination()

    def _move_clocks(self, now: float, previous: Mapping[int, Sample]) -> Mapping[int, Sample]:
        """Returns the samples with which the new ones are to be compared."""
        from ddplaunch.features.hangs.rank_state import ACTIVE, RankState

        choices = [(earlier, self._states(earlier)) for earlier in (previous, self._active_samples)]
        earlier, states = next((choice for choice in choices if choice[1] & ACTIVE), choices[0])
        if RankState.MOVING in states:
            self._progress_at = now
        if states & ACTIVE - {RankState.MOVING}:
            self._busy_at = now
        if states & ACTIVE:
            self._active_samples = self._samples
        return earlier

    def _move_collective_clock(self, now: float, previous: Mapping[int, Sample]) -> None:
        statuses, before = _statuses(self._samples), _statuses(previous)
        if not statuses:
            self._collective_at = None
        elif self._collective_at is None or not statuses.items() <= before.items():
            self._collective_at = now

    def _states(self, earlier: Mapping[int, Sample]) -> set[RankState]:
        from ddplaunch.features.hangs import evidence
        from ddplaunch.features.hangs.rank_state import rank_state

        return {rank_state(each) for each in evidence.of_group(self._group, self._samples, earlier)}

    def _quiet_and_still_s(self, now: float) -> tuple[float, float]:
        progress_at = self._last_progress()
        return now - progress_at, now - max(progress_at, self._busy_at)

    def _time_to_next(self, quiet_s: float, still_s: float) -> float:
        """Seconds until the next sample: at the latest when a limit is reached."""
        if not self._limits:
            return NEVER
        left = (limit - reached for limit in self._limits for reached in (quiet_s, still_s))
        first = (self._first_sample_s - quiet_s,)  # While output flows.
        return max(_MIN_PERIOD_S, min([self._period_s, *(each for each in (*left, *first) if each > 0)]))

    # Reports.

    def _report(self, quiet_s: float, still_s: float, now: float) -> None:
        self._is_reported, self._is_waiting_reported = True, False
        self._send(self._activity(now, quiet_s, still_s))

    def _report_waiting(self, now: float, *, is_new: bool = False) -> None:
        """While output flows: the workers call no collective, or they do again; ``is_new``: they were quiet."""
        activity = self._activity(now)
        if activity.waiting_s or self._is_waiting_reported or is_new:
            self._is_waiting_reported = bool(activity.waiting_s)
            self._send(activity)

    def _activity(self, now: float, quiet_s: float = 0.0, still_s: float = 0.0) -> WorkerActivity:
        from ddplaunch.features.hangs import evidence
        from ddplaunch.features.hangs.rank_state import waits

        return WorkerActivity(
            self._group.attempt,
            quiet_s,
            still_s,
            waiting_s=max(0.0, now - max(self._collective_at, self._last_debugged())) if self._collective_at else 0.0,
            has_waiting=any(map(waits, evidence.of_group(self._group, self._samples, {}))),
            host=self._group.host,
        )

    def _on_active(self) -> None:
        if self._is_reported:
            self._is_reported = False
            self._report_waiting(time.monotonic(), is_new=True)
        self._deadline = min(self._deadline, time.monotonic() + self._first_sample_s)

    def _on_output(self) -> None:
        """In the thread of a stream."""
        self._post(lambda: None if self._is_finished else self._on_active())

    def _answer(
        self, orders: Sequence[ExamineWorkers], earlier: Mapping[int, Sample], node: NodeEvidence | None
    ) -> None:
        from ddplaunch.features.hangs import evidence

        ranks = tuple(evidence.of_group(self._group, self._samples, earlier, self._stacks)) if orders else ()
        for order in orders:
            self._send_examination(order, ranks, node)

    def _refuse(self, orders: Sequence[ExamineWorkers]) -> None:
        """Answer requests at once: none of these workers runs any more."""
        for order in orders:
            if order.is_requested:
                self._send_examination(order, (), None)

    def _send_examination(
        self, order: ExamineWorkers, ranks: tuple[RankEvidence, ...], node: NodeEvidence | None
    ) -> None:
        send = self._to_own_launcher if order.all_nodes_at else self._send
        send(WorkersExamined(order.attempt, order.number, ranks, node, order.all_nodes_at))


def _statuses(samples: Mapping[int, Sample]) -> dict[int, tuple[int, bytes]]:
    return {rank: (sample.activity.pid, sample.status) for rank, sample in samples.items() if sample.status}


def _load() -> None:
    """Import, once, what samples, examinations and the end of a failed attempt need."""
    from ddplaunch.features.hangs import evidence, rank_state  # noqa: F401
