"""Reads when the workers of this node called collectives, and what slowed them down, whenever the launcher asks.

Runs in the agent: a short-lived thread reads, because a worker may take seconds to answer; all else is in the main
thread. Must not decide which rank is slow: only the launcher has the times of all nodes.

Cost: nothing until the launcher asks; then in each worker 60 us of the GIL for each recorded call.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.hangs import examiner, worker_records
from ddplaunch.features.slow_ranks.records import MAX_SENT, CollectivesSampled, RankLoad, SampleCollectives, pack
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.examiner import Answer
    from ddplaunch.features.hangs.process_activity import ProcessActivity
    from ddplaunch.features.slow_ranks.records import CollectiveTimes
    from ddplaunch.protocol.results import Round

_MAX_JOB_CALLS = 1 << 18
_MIN_SENT = 256
"""Calls of all ranks in one sample, so that the launcher needs less than a second for them; but so many of each."""


class SlowRanksPart(Part):
    """Samples the workers of one attempt after the other, if there are several and the user wants to be told."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._examiner = examiner.of(node.worker_socket)
        self._newest = 0
        self._loads: dict[int, ProcessActivity] = {}
        self._is_reading = self._is_announced = False

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """As ``Part.on_attempt``."""
        if round_.world_size > 1 and self._node.spec.timeouts.hang_report_s is not None:
            super().on_attempt(group, round_)
            self._loads, self._is_reading, self._is_announced = {}, False, False
            self._newest = max(_MIN_SENT, min(MAX_SENT, _MAX_JOB_CALLS // round_.world_size))
            self._examiner.on_accepted = self._announce

    def _announce(self) -> None:
        """A worker has created a process group: the launcher may ask. In the thread of the socket for workers."""
        if self._group and not self._is_announced:
            self._is_announced = True
            first = CollectivesSampled(self._group.attempt, 0, self._group.host)
            self._node.post(partial(self._node.report, first))

    def on_event(self, event: object) -> bool:
        """As ``Part.on_event``: the launcher asks. An order for an earlier attempt has no effect."""
        group = self._group
        if group is None or not isinstance(event, SampleCollectives):
            return False
        if event.attempt == group.attempt and not self._is_reading:
            self._is_reading = True
            record = CollectivesSampled(event.attempt, event.number, group.host)
            is_debugged = bool(group.debugged_at)
            self._node.report(replace(record, clock_ns=time.time_ns(), is_debugged=is_debugged))
            pids = group.pids_by_local_rank()
            workers = [worker for worker in group.workers if worker.local_rank in pids]
            read = lambda: partial(self._on_read, group, self._read(record, workers, event.suspects))  # noqa: E731
            post_from_thread("collectives", read, self._node.post, partial(self._on_read, group, record))
        return True

    def _on_read(self, group: WorkerGroup, record: CollectivesSampled) -> None:
        if group is self._group:
            self._is_reading = False
            self._node.report(record)

    # In the thread.

    def _read(
        self, record: CollectivesSampled, workers: Sequence[Worker], suspects: Collection[int]
    ) -> CollectivesSampled:
        pids = {worker.rank: worker.pid for worker in workers}
        before = self._examiner.ask(pids.values(), worker_records.STATUS)
        answers = self._examiner.ask(pids.values(), worker_records.RECORD)
        costs = (answer.cpu_s - before[pid].cpu_s for pid, answer in answers.items() if pid in before)
        throttled = {each.rank: self._throttled(each.local_rank) for each in workers if each.rank in suspects}
        return replace(
            record,
            times=tuple(
                times for rank, pid in pids.items() if pid in answers for times in self._times(rank, answers[pid])
            ),
            loads=tuple(self._load_of_each(pids, throttled)),
            cost_s=max([0.0, *costs]),
        )

    def _times(self, rank: int, answer: Answer) -> Iterator[CollectiveTimes]:
        from ddplaunch.features.hangs import flight_record

        try:
            found = flight_record.parse_times(answer.record, self._newest)
        except ValueError:  # Another torch, or a record that is cut: an examination tells why.
            return
        for group, calls in found.items():
            yield pack(rank, group, calls)

    def _load_of_each(self, pids: Mapping[int, int], throttled: Mapping[int, str]) -> Iterator[RankLoad]:
        from ddplaunch.features.hangs import process_activity

        connections = process_activity.tcp_connections()
        for rank, pid in pids.items():
            now, earlier = process_activity.read(pid, connections), self._loads.get(rank)
            self._loads[rank] = now
            if earlier and earlier.pid == pid:
                yield RankLoad(
                    rank=rank,
                    window_s=now.at - earlier.at,
                    cpu_s=now.cpu_since(earlier),
                    io_bytes=now.io_since(earlier),
                    run_queue_wait_s=now.waited_since(earlier),
                    throttled=throttled.get(rank, ""),
                )

    def _throttled(self, local_rank: int) -> str:
        """Why the GPU of a worker is throttled; empty if it is not, or unknown. Blocks for seconds."""
        names = self._node.placement.devices_of(local_rank)
        if not names or self._node.spec.dry_run:
            return ""
        from ddplaunch.features.hangs import node_evidence

        return node_evidence.throttled(names[0])


part = SlowRanksPart
