"""Measures for how long the workers of this node have done nothing, and examines them when the launcher asks.

Runs in the agent, main thread only; the threads of the streams tell of new output, and a thread takes the samples. Must
not decide that the job hangs: the launcher decides, from the reports of all nodes. All times are those of
``time.monotonic()``.

Cost: two samples a minute, which take a worker 0.1 ms, while workers that have a process group write output. After
``_FIRST_SAMPLE_S`` without any, one more. What samples need is imported after ``_LOAD_S``: a short run does without it,
and a file system that hangs later has no effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.features.hangs import stack_dumps
from ddplaunch.features.hangs.examiner import ANSWER_S, Examiner
from ddplaunch.features.hangs.records import ExamineWorkers, WorkerActivity, WorkersExamined, folded
from ddplaunch.mailbox import NEVER
from ddplaunch.threads import post_from_thread, start_work
from ddplaunch.timeouts import AUTO_HANG_REPORT_S, TimeoutConfig

if TYPE_CHECKING:
    from ddplaunch.agent.parts import NodeServices
    from ddplaunch.agent.rendezvous import Wait
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.evidence import Sample
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


def _limits(timeouts: TimeoutConfig) -> tuple[float, ...]:
    """The times without movement, in seconds, at which something follows; empty if the workers are not watched."""
    report_s = AUTO_HANG_REPORT_S if timeouts.hang_report_s == "auto" else timeouts.hang_report_s
    return tuple(each for each in (report_s, timeouts.hang_timeout_s, timeouts.busy_timeout_s) if each is not None)


class ActivityWatch:
    """Watches the workers of one attempt.

    At its deadline it looks how long they have been quiet, or goes on with an examination. While a thread takes a
    sample there is no deadline: the end of the sample sets the next one.
    """

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
        self._limits = _limits(node.spec.timeouts)
        shortest = min(self._limits, default=NEVER)
        self._first_sample_s = min(shortest / 10, _FIRST_SAMPLE_S) if self._limits else NEVER
        self._period_s = min(max(shortest / 6, _MIN_PERIOD_S), _MAX_PERIOD_S)
        self._group, self._stacks, self._examiner, self._ask_node = group, stacks, examiner, ask_node
        self._send, self._post, self._to_own_launcher = node.report, node.post, node.outbox.send
        self._clocks = _Clocks(group, time.monotonic())
        self._told = WorkerActivity(group.attempt)
        """What the launcher knows."""
        self._deadline, self._sampled_at = NEVER, 0.0
        self._is_sampling = self._is_over = False
        self._asked: list[ExamineWorkers] = []
        """Orders for the next examination."""
        self._examining: list[ExamineWorkers] = []
        """Orders that the present examination answers."""

    def begin(self) -> None:
        """The workers run."""
        now = self._sampled_at = time.monotonic()
        self._clocks.restart(now)
        self._deadline = now + min(_LOAD_S, self._first_sample_s)

    def run_due(self, now: float) -> float:
        """Do what is due at ``now``. Returns when to call again at the latest, or infinity."""
        if self._is_over:
            return NEVER
        if self._told.quiet_s and self._group.debugged:
            self._on_active()
        if now >= self._deadline and not self._is_sampling:
            if self._examining:
                self._end_examination()
            else:
                self._look(now)
        return NEVER if self._is_sampling else self._deadline

    def end(self) -> None:
        """The attempt ends. Later orders are refused."""
        self._is_over = True
        self._refuse(self._examining + self._asked)
        if self._limits:
            self._send(WorkerActivity(self._group.attempt, is_finished=True))

    def is_of(self, attempt: int) -> bool:
        """Whether the watch is that of ``attempt``, which has not ended."""
        return attempt == self._group.attempt and not self._is_over

    # Before a stop.

    @property
    def delays_stop(self) -> bool:
        """Whether ``examine_before_stop`` comes before the stop: the attempt runs, and its workers are quiet."""
        return not self._is_over and self._is_quiet

    @property
    def _is_quiet(self) -> bool:
        quiet_s = self._clocks.quiet_s(time.monotonic())
        return bool(self._limits) and quiet_s >= min(_QUIET_AT_STOP_S, *self._limits)

    def examine_before_stop(self, wait: Wait) -> None:
        """If the workers have been quiet for long, send the launcher what they do, in at most ``_STOP_EXAMINATION_S``.

        Call it after ``end``, before the workers are stopped: the user may stop the job because it seems to hang. The
        wait ends when all workers have ended, as after a second signal of the user.
        """
        if not self._is_quiet:
            return
        found: list[tuple[Mapping[int, Sample], NodeEvidence | None]] = []
        stack_dumps.request(self._stacks)
        self._sample(lambda *each: found.append(each), reads_all=True, node_s=_STOP_NODE_S, answer_s=_STOP_ANSWER_S)
        end_s = time.monotonic() + _STOP_EXAMINATION_S
        wait(lambda: bool(found) or self._group.all_ended, lambda: end_s)
        for samples, node in found:
            ranks = self._evidence(samples, self._clocks.samples)
            self._answer([ExamineWorkers(self._group.attempt, 0)], ranks, node)

    # Quiet workers.

    def _look(self, now: float) -> None:
        """Take a sample if the workers are quiet, or if it is time and they can be asked."""
        # Before it is needed at the end of a failed attempt: the file system may hang then.
        from ddplaunch.features.hangs import evidence  # noqa: F401

        if now - self._deadline > _SUSPENDED_S:  # The whole job was suspended, including its workers.
            self._clocks.restart(now)
        for stream in self._group.streams:  # Set before the check: output that arrives during it is also posted.
            stream.on_next_output = self._on_output if self._told.quiet_s else None
        quiet_s = self._clocks.quiet_s(now)
        if quiet_s >= self._first_sample_s or (now >= self._sampled_at + self._period_s and self._can_be_asked()):
            self._sample(partial(self._on_sampled, False))
        else:
            self._deadline = now - quiet_s + self._first_sample_s

    def _can_be_asked(self) -> bool:
        return any(map(self._examiner.is_connected, self._group.pids_by_local_rank().values()))

    def _sample(
        self,
        then: Callable[[Mapping[int, Sample], NodeEvidence | None], object],
        *,
        reads_all: bool = False,
        node_s: float = _NODE_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Sample in a thread. The main thread calls ``then`` with the workers' samples, and with the node's evidence.

        That is None unless the thread ``reads_all``.
        """
        self._is_sampling = True
        pids, earlier = self._group.pids_by_local_rank(), self._clocks.samples

        def sampled() -> Callable[[], object]:
            from ddplaunch.features.hangs import evidence

            node = start_work("node", lambda: self._ask_node(node_s) if reads_all else None, None)
            samples = evidence.take_samples(self._examiner, pids, earlier, reads_all=reads_all, answer_s=answer_s)
            return partial(then, samples, node(time.monotonic() + node_s))

        # Without room for a thread it is as if nothing were known of the workers.
        post_from_thread("sampler", sampled, self._post, lambda: then({}, None))

    def _on_sampled(self, is_whole: bool, samples: Mapping[int, Sample], node: NodeEvidence | None) -> None:
        """``is_whole``: the orders that wait for this sample are answered with it."""
        if self._is_over:
            return
        now = self._sampled_at = time.monotonic()
        self._is_sampling = False
        earlier = self._clocks.take(samples, now)
        if is_whole:
            self._answer(self._examining, self._evidence(samples, earlier), node)
            self._examining = []
        quiet_s, still_s = self._clocks.quiet_s(now), self._clocks.still_s(now)
        is_quiet = quiet_s >= self._first_sample_s
        self._report(now, quiet_s if is_quiet else 0.0, still_s if is_quiet else 0.0)
        self._deadline = now + (_STACKS_APART_S if self._examining else self._time_to_next(quiet_s, still_s))
        self._begin_examination()

    def _time_to_next(self, quiet_s: float, still_s: float) -> float:
        """Seconds until the next sample: at the latest when a limit is reached."""
        if not self._limits:
            return NEVER
        left = (limit - reached for limit in self._limits for reached in (quiet_s, still_s))
        first = (self._first_sample_s - quiet_s,)  # While output flows.
        return max(_MIN_PERIOD_S, min([self._period_s, *(each for each in (*left, *first) if each > 0)]))

    def _on_active(self) -> None:
        now = time.monotonic()
        if self._told.quiet_s:
            self._report(now, 0.0, 0.0)
        if not self._examining:
            self._deadline = min(self._deadline, now + self._first_sample_s)

    def _on_output(self) -> None:
        """In the thread of a stream."""
        self._post(lambda: None if self._is_over else self._on_active())

    def _report(self, now: float, quiet_s: float, still_s: float) -> None:
        """While workers are quiet or call no collective, and once when they do again."""
        activity = WorkerActivity(
            self._group.attempt,
            quiet_s,
            still_s,
            waiting_s=self._clocks.waiting_s(now),
            has_waiting=self._clocks.has_waiting,
            host=self._group.host,
        )
        told, self._told = self._told, activity
        if any(each.quiet_s or each.waiting_s for each in (told, activity)):
            self._send(activity)

    # Examinations.

    def examine(self, order: ExamineWorkers) -> None:
        """Answer an order, after the present examination. One for another attempt, or after ``end``, is refused."""
        if not self.is_of(order.attempt):
            self._refuse([order])
            return
        self._asked.append(order)
        self._begin_examination()

    def _begin_examination(self) -> None:
        """Examine the workers for all questions that wait, unless an examination goes on.

        Two stacks and two samples, ``_STACKS_APART_S`` apart. What the limits ask about is compared with the last
        sample; for a request that may be hours old.
        """
        if self._examining or not self._asked:
            return
        self._examining, self._asked = self._asked, []
        stack_dumps.request(self._stacks)
        self._deadline = time.monotonic() + _STACKS_APART_S
        if any(order.is_requested for order in self._examining) and not self._is_sampling:
            self._sample(partial(self._on_sampled, False))

    def _end_examination(self) -> None:
        stack_dumps.request(self._stacks)
        self._sample(partial(self._on_sampled, True), reads_all=True)

    def _evidence(self, samples: Mapping[int, Sample], earlier: Mapping[int, Sample]) -> tuple[RankEvidence, ...]:
        from ddplaunch.features.hangs import evidence

        return tuple(evidence.of_group(self._group, samples, earlier, self._stacks))

    def _refuse(self, orders: Sequence[ExamineWorkers]) -> None:
        """Answer requests at once: none of these workers runs any more."""
        self._answer([order for order in orders if order.is_requested], (), None)

    def _answer(
        self, orders: Sequence[ExamineWorkers], ranks: tuple[RankEvidence, ...], node: NodeEvidence | None
    ) -> None:
        for order in orders:
            send = self._to_own_launcher if order.all_nodes_at else self._send
            send(WorkersExamined(order.attempt, order.number, folded(ranks), node, order.all_nodes_at))


class _Clocks:
    """Since when the workers of one attempt have done nothing, from their output and from samples of them.

    Imports late what judges samples: a short run takes none.

    Attributes:
        samples: the newest, by local rank.
    """

    def __init__(self, group: WorkerGroup, now: float) -> None:
        self._group = group
        self.samples: Mapping[int, Sample] = {}
        self._active_samples: Mapping[int, Sample] = {}
        """Those of when a worker last moved or was busy: whoever does little is seen over a longer time."""
        self._moved_at = self._busy_at = now
        self._collective_at: float | None = None
        """None: not known."""

    def restart(self, now: float) -> None:
        """The workers have just begun, or nothing before ``now`` counts: the whole machine was suspended."""
        self._moved_at = self._busy_at = now
        self._collective_at = None if self._collective_at is None else now

    def quiet_s(self, now: float) -> float:
        """As ``WorkerActivity.quiet_s``."""
        written = (stream.written_s for stream in self._group.streams)
        return now - max([self._moved_at, self._last_debugged(now), *written])

    def still_s(self, now: float) -> float:
        """As ``WorkerActivity.still_s``."""
        return min(self.quiet_s(now), now - self._busy_at)

    def waiting_s(self, now: float) -> float:
        """As ``WorkerActivity.waiting_s``."""
        if self._collective_at is None:
            return 0.0
        return max(0.0, now - max(self._collective_at, self._last_debugged(now)))

    def _last_debugged(self, now: float) -> float:
        """Until when ranks waited for the user of a debugger, not for each other."""
        return now if self._group.debugged else self._group.debugged_at

    def take(self, samples: Mapping[int, Sample], now: float) -> Mapping[int, Sample]:
        """Take new samples of the workers that run. Returns those with which they are to be compared."""
        from ddplaunch.features.hangs.rank_state import ACTIVE, RankState

        previous, self.samples = self.samples, samples
        choices = [(earlier, self._states(earlier)) for earlier in (previous, self._active_samples)]
        earlier, states = next((choice for choice in choices if choice[1] & ACTIVE), choices[0])
        if RankState.MOVING in states:
            self._moved_at = now
        if states & ACTIVE - {RankState.MOVING}:
            self._busy_at = now
        if states & ACTIVE:
            self._active_samples = samples
        statuses, before = _statuses(samples), _statuses(previous)
        if not statuses:
            self._collective_at = None
        elif self._collective_at is None or not statuses.items() <= before.items():
            self._collective_at = now
        return earlier

    def _states(self, earlier: Mapping[int, Sample]) -> set[RankState]:
        from ddplaunch.features.hangs import evidence
        from ddplaunch.features.hangs.rank_state import rank_state

        return {rank_state(each) for each in evidence.of_group(self._group, self.samples, earlier)}

    @property
    def has_waiting(self) -> bool:
        """As ``WorkerActivity.has_waiting``."""
        from ddplaunch.features.hangs import evidence
        from ddplaunch.features.hangs.rank_state import waits

        return any(map(waits, evidence.of_group(self._group, self.samples, {})))


def _statuses(samples: Mapping[int, Sample]) -> dict[int, tuple[int, bytes]]:
    return {rank: (sample.activity.pid, sample.status) for rank, sample in samples.items() if sample.status}
