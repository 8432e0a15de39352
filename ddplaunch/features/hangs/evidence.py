"""Builds the RankEvidence of this node's workers from two samples and their Python stacks.

Runs in the agent, main thread. Pure but for the stacks, which it reads from the workers' files.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.records import MAX_STACK_CHARS, MAX_UNANSWERED, RankEvidence
from ddplaunch.protocol import stack_dump
from ddplaunch.system import procfs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.sampler import Sample

_MAX_NAME = 100


def of_group(
    group: WorkerGroup, samples: Mapping[int, Sample], earlier: Mapping[int, Sample], *, with_stacks: bool = False
) -> Iterator[RankEvidence]:
    """Evidence of each worker, by local rank. Without an ``earlier`` sample of a worker, nothing of it has moved."""
    for worker in group.workers:
        sample = samples.get(worker.local_rank)
        if not worker.is_running or sample is None or sample.pid != worker.pid:
            yield RankEvidence(
                rank=worker.rank, local_rank=worker.local_rank, host=group.host, pid=worker.pid, is_running=False
            )
        else:
            yield _of_worker(group.host, worker, sample, earlier.get(worker.local_rank), with_stacks)


def _of_worker(host: str, worker: Worker, sample: Sample, earlier: Sample | None, with_stacks: bool) -> RankEvidence:
    if earlier is None or earlier.pid != sample.pid:
        earlier = sample
    dumps = worker.stacks[-2:] if with_stacks else ()
    activity, before = sample.activity, earlier.activity
    written_at = max([worker.started_at, *(pump.stream.written_s for pump in worker.pumps)])
    return RankEvidence(
        rank=worker.rank,
        local_rank=worker.local_rank,
        host=host,
        pid=worker.pid,
        silent_s=max(0.0, time.monotonic() - written_at),
        window_s=sample.at - earlier.at,
        cpu_s=max(0.0, activity.cpu_since(before) - max(0.0, sample.answers_cpu_s - earlier.answers_cpu_s)),
        io_bytes=activity.io_since(before),
        run_queue_wait_s=max(0.0, activity.run_queue_wait_s - before.run_queue_wait_s),
        collectives_moved=sample.status != earlier.status if sample.status and earlier.status else None,
        blocked_state=sample.blocked_state,
        where=stack_dump.whereabouts(dumps[-1])[:_MAX_NAME] if dumps else "",
        stack_is_same=stack_dump.main_thread(dumps[-1]) == stack_dump.main_thread(dumps[-2]) if dumps[1:] else None,
        stacks=dumps[-1][-MAX_STACK_CHARS:] if dumps else "",
        waits_for_input=sample.waits_for_input,
        debugger=stack_dump.debugger(dumps[-1]) if dumps else "",
        pending=sample.pending,
        flight_record=sample.flight_record,
        busy_child=_busy_child(sample, earlier),
        unanswered=activity.unanswered[:MAX_UNANSWERED],
        missing_sources=(*sample.missing_sources, *_missing_stacks(dumps, with_stacks)),
    )


def _missing_stacks(dumps: tuple[str, ...], with_stacks: bool) -> tuple[str, ...]:
    missing = with_stacks and not dumps
    return ("Python stacks: the worker has written none; it is suspended, or not started by ddplaunch",) * missing


def _busy_child(sample: Sample, earlier: Sample) -> str:
    pid = sample.activity.busiest_child(earlier.activity, sample.pid)
    if pid is None:
        return ""
    name = procfs.read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip()[:_MAX_NAME]
    return f"{name if name.isprintable() else 'a child'} (pid {pid})"
