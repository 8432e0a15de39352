"""``--event-log-handler console``: shows torchelastic's worker events, one JSON object per line.

Runs in the launcher, in the main thread. The fields are those of ``torch.distributed.elastic.events.api.Event``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ddplaunch.launcher.watches import Watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.launcher.watches import RunServices
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult, WorkerExit


class WorkerEvents(Watch):
    """Shows the events of an attempt that has ended."""

    def __init__(self, run: RunServices) -> None:
        self._run = run

    def explain(self, result: AttemptResult, evidence: Sequence[Report]) -> AttemptResult:
        """All nodes have reported the end of the attempt."""
        messages = self._run.messages
        messages.console.flush()
        for line in worker_events(messages.run_id, self._run.config.workers.role, result):
            messages.console.show(line)
        return result


def worker_events(run_id: str, role: str, attempt: AttemptResult) -> list[str]:
    """One line for each worker of an attempt; the timestamp is when it raised or ended, in ms since the epoch."""
    return [json.dumps(_event(run_id, role, attempt, exit_)) for exit_ in attempt.exits]


def _event(run_id: str, role: str, attempt: AttemptResult, exit_: WorkerExit) -> dict[str, object]:
    state = "SUCCEEDED" if exit_.returncode == 0 else "TERMINATED" if exit_.stopped else "FAILED"
    metadata = {
        "run_id": run_id,
        "global_rank": exit_.rank,
        "group_rank": exit_.node_rank,
        "worker_id": str(exit_.pid),
        "role": role,
        "hostname": exit_.host,
        "state": state,
        "total_run_time": round(exit_.duration_s, 3),
        "rdzv_backend": "c10d",
        "raw_error": exit_.error.message if exit_.error else None,
        "metadata": json.dumps({"local_rank": [exit_.local_rank], "exit_code": [exit_.returncode]}),
        "agent_restarts": attempt.restart_count,
        "duration_ms": round(exit_.duration_s * 1000),
    }
    return {
        "name": f"torchelastic.worker.status.{state}",
        "source": "WORKER",
        "timestamp": int(exit_.time_s * 1000),
        "metadata": metadata,
    }
