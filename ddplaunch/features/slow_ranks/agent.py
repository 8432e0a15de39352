"""Reads when the workers of this node called collectives, and what slowed them down, whenever the launcher asks.

Runs in the agent: a short-lived thread reads, because a worker may take seconds to answer, and posts CollectivesRead;
all else is in the main thread. Must not decide which rank is slow: only the launcher has the times of all nodes.

Cost: nothing until the launcher asks; then in each worker 60 us of the GIL for each recorded call.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.hangs import examiner, worker_records
from ddplaunch.features.slow_ranks.records import MAX_SENT, CollectivesSampled, RankLoad, SampleCollectives, pack
from ddplaunch.late_dataclass import dataclass
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.examiner import Answer, Examiner
    from ddplaunch.features.hangs.process_activity import ProcessActivity
    from ddplaunch.features.slow_ranks.records import PackedTimes
    from ddplaunch.protocol.results import Round

_MAX_JOB_CALLS = 1 << 18
_MIN_SENT = 256
"""Calls of all ranks in one sample, so that the launcher needs less than a second for them; but so many of each."""


@dataclass(frozen=True)
class CollectivesRead:
    """Event: a thread has read when workers called collectives; ``record`` is for the launcher that watches the job."""

    record: CollectivesSampled


class _Load(NamedTuple):
    at: float
    pid: int
    activity: ProcessActivity


class SlowRanksPart(Part):
    """Samples the workers of one attempt after the other, if there are several and the user wants to be told."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._sampling: CollectiveSampling | None = None

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """As ``Part.on_attempt``."""
        if round_.world_size > 1 and self._node.spec.timeouts.hang_report_s is not None:
            asking = examiner.of(self._node.worker_socket)
            self._sampling = CollectiveSampling(group, round_, asking, self._throttled, self._node.post)

    def _throttled(self, local_rank: int) -> str:
        """Why the GPU of a worker is throttled; empty if it is not, or unknown. Blocks for seconds."""
        names = self._node.placement.devices_of(local_rank)
        if not names or self._node.spec.dry_run:
            return ""
        from ddplaunch.features.hangs import node_evidence

        return node_evidence.throttled(names[0])

    def on_event(self, event: object) -> bool:
        """As ``Part.on_event``."""
        if self._sampling is None or not isinstance(event, (SampleCollectives, CollectivesRead)):
            return False
        if sampled := self._sampling.handle_event(event):
            self._node.report(sampled)
        return True


class CollectiveSampling:
    """Samples the workers of one attempt."""

    def __init__(
        self,
        group: WorkerGroup,
        round_: Round,
        examiner: Examiner,
        throttled: Callable[[int], str],
        post: Callable[[object], None],
    ) -> None:
        """Once a worker has created a process group, a CollectivesRead for the launcher is posted.

        Args:
            group: the workers of the attempt.
            round_: its ranks.
            examiner: asks the workers for their flight records.
            throttled: why the GPU of a local rank is throttled; blocks for seconds.
            post: posts an event to this agent; any thread calls it.
        """
        self._group, self._examiner, self._throttled, self._post = group, examiner, throttled, post
        self._newest = max(_MIN_SENT, min(MAX_SENT, _MAX_JOB_CALLS // round_.world_size))
        self._loads: dict[int, _Load] = {}
        self._is_reading = self._is_announced = False
        examiner.on_accepted = self._announce

    def _announce(self) -> None:
        """A worker has created a process group. Called in the thread of the socket for workers."""
        if not self._is_announced:
            self._is_announced = True
            self._post(CollectivesRead(CollectivesSampled(self._group.attempt, 0, self._group.host)))

    def handle_event(self, event: SampleCollectives | CollectivesRead) -> CollectivesSampled | None:
        """Handle an event; returns what the launcher must get. Events of an earlier attempt are ignored."""
        if isinstance(event, CollectivesRead):
            self._is_reading = self._is_reading and not event.record.number
            return event.record if event.record.attempt == self._group.attempt else None
        if event.attempt == self._group.attempt and not self._is_reading:
            self._is_reading = True
            local_ranks = {worker.rank: worker.local_rank for worker in self._group.workers}
            by_local_rank = self._group.pids_by_local_rank()
            pids = {rank: by_local_rank[local] for rank, local in local_ranks.items() if local in by_local_rank}
            suspects = {rank: local_ranks[rank] for rank in event.suspects if rank in pids}
            self._start(event, pids, suspects)
            return CollectivesSampled(
                event.attempt,
                event.number,
                self._group.host,
                clock_ns=time.time_ns(),
                is_debugged=bool(self._group.debugged_at),
            )
        return None

    def _start(self, order: SampleCollectives, pids: Mapping[int, int], suspects: Mapping[int, int]) -> None:
        nothing = CollectivesRead(CollectivesSampled(order.attempt, order.number, self._group.host))
        post_from_thread("collectives", lambda: self._sampled(order, pids, suspects), self._post, nothing)

    # In the thread.

    def _sampled(
        self, order: SampleCollectives, pids: Mapping[int, int], suspects: Mapping[int, int]
    ) -> CollectivesRead:
        before = self._examiner.ask(pids.values(), worker_records.STATUS)
        answers = self._examiner.ask(pids.values(), worker_records.RECORD)
        costs = (answer.cpu_s - before[pid].cpu_s for pid, answer in answers.items() if pid in before)
        throttled = {rank: self._throttled(local_rank) for rank, local_rank in suspects.items()}
        record = CollectivesSampled(
            order.attempt,
            order.number,
            self._group.host,
            times=tuple(
                times for rank, pid in pids.items() if pid in answers for times in self._times(rank, answers[pid])
            ),
            loads=tuple(self._load_of_each(pids, throttled)),
            cost_s=max([0.0, *costs]),
        )
        return CollectivesRead(record)

    def _times(self, rank: int, answer: Answer) -> Iterator[PackedTimes]:
        from ddplaunch.features.hangs import flight_record

        try:
            found = flight_record.parse_times(answer.record, rank, self._group.host, self._newest)
        except ValueError:  # Another torch, or a record that is cut: an examination tells why.
            return
        yield from map(pack, found)

    def _load_of_each(self, pids: Mapping[int, int], throttled: Mapping[int, str]) -> Iterator[RankLoad]:
        from ddplaunch.features.hangs import process_activity

        for rank, pid in pids.items():
            now, earlier = _Load(time.monotonic(), pid, process_activity.read(pid)), self._loads.get(rank)
            self._loads[rank] = now
            if earlier and earlier.pid == pid:
                yield _rank_load(rank, now, earlier, throttled.get(rank, ""))


def _rank_load(rank: int, now: _Load, earlier: _Load, throttled: str) -> RankLoad:
    return RankLoad(
        rank=rank,
        window_s=now.at - earlier.at,
        cpu_s=now.activity.cpu_since(earlier.activity),
        io_bytes=now.activity.io_since(earlier.activity),
        run_queue_wait_s=max(0.0, now.activity.run_queue_wait_s - earlier.activity.run_queue_wait_s),
        throttled=throttled,
    )


part = SlowRanksPart
