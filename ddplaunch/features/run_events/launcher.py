"""What happened in a run, and when: writes events.jsonl, see ``kinds``, and shows torchelastic's worker events.

Runs in the launcher: the main thread notes events, and reading threads the first output. All times are by this
machine's clock; what another host reports gets the moment of its arrival.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddplaunch.features.run_events.event_file import EventFile
from ddplaunch.features.run_events.kinds import SCHEMA
from ddplaunch.launcher.display.failure_page import failure_line
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.launcher_agent import AgentEnded, AgentReady, AttemptEnded, AttemptStarted, Output, Report
from ddplaunch.transport.handle import AgentConnected, WriteOutput

if TYPE_CHECKING:
    from ddplaunch.protocol.results import AttemptResult, WorkerExit
    from ddplaunch.protocol.run_result import RunResult

_MAX_FAILURES = 20


class RunEvents(Watch):
    """The events of one run."""

    def __init__(self, run: RunServices) -> None:
        self._file, self._nodes = EventFile(run.folder()), run.nodes
        self._is_local = run.config.is_local
        self._started_s: dict[tuple[int, int], float] = {}
        self._has_started = False
        self._heard: set[tuple[int, str]] = set()
        text, t = run.messages.run_id, round(time.time(), 3)
        self._file.add({"schema": SCHEMA, "t": t, "event": "run_started", "text": text})

    def on_note(self, event: str, text: str, t: float | None, node: int | None, facts: Mapping[str, object]) -> None:
        """Write an event. Any thread; never blocks."""
        where = {} if node is None else {"node": node, "host": self._nodes.all[node].host}
        moment = round(time.time() if t is None else t, 3)
        self._file.add({"t": moment, "event": event, **where, **facts, **({"text": text} if text else {})})

    def _add(
        self, event: str, text: str = "", t: float | None = None, node: int | None = None, **facts: object
    ) -> None:
        self.on_note(event, text, t, node, facts)

    def on_output(self, write: WriteOutput) -> WriteOutput:
        """Note the first output of each node in an attempt."""

        def noting_first(header: Output, data: bytes) -> None:
            if (header.attempt, header.host) not in self._heard:
                self._heard.add((header.attempt, header.host))
                self._add("first_output", attempt=header.attempt, host=header.host, rank=header.rank)
            write(header, data)

        return noting_first

    # Events of nodes.

    def on_event(self, index: int, event: object) -> None:
        """An event of node ``index``. Other events have no effect."""
        match event:
            case AgentConnected():
                self._add("agent_connected", node=index)
            case AgentReady(local_world_size=workers):
                kind = "node_joined" if self._has_started else "agent_ready"
                self._add(kind, node=index, workers=workers)
            case AttemptStarted():
                self._on_started(index, event)
            case AttemptEnded(result=result):
                self._on_ended(index, result)
            case AgentEnded():
                self._add("node_left", node=index)

    def _on_started(self, index: int, event: AttemptStarted) -> None:
        self._has_started, self._started_s[index, event.attempt] = True, time.time()
        self._add(
            "attempt_started",
            node=index,
            attempt=event.attempt,
            workers=len(event.pids),
            first_rank=event.first_rank,
            world_size=event.world_size,
            import_s=round(event.import_s, 3),
            **self._folder(index),
        )

    def _folder(self, index: int) -> dict[str, Any]:
        """Where the files of a node on another machine are, as far as it is known."""
        details = None if self._is_local else self._nodes.all[index].details
        return {"folder": details.folder} if details and details.folder else {}

    def _on_ended(self, index: int, result: AttemptResult) -> None:
        # The agent reports exits at the end of the attempt: when they happened follows from how long the workers ran.
        started_s = self._started_s.pop((index, result.attempt), None)
        if started_s is None and result.exits:  # A worker has failed before all of them ran.
            self._add(
                "attempt_started",
                t=time.time() - result.duration_s,
                node=index,
                attempt=result.attempt,
                workers=len(result.exits),
                first_rank=min(exit_.rank for exit_ in result.exits),
                **self._folder(index),
            )
        for exit_ in first_failure.failures(result.exits)[:_MAX_FAILURES]:
            ended_s = None if started_s is None else min(time.time(), started_s + exit_.duration_s)
            text = failure_line(exit_)
            self._add("worker_failed", text, ended_s, index, attempt=result.attempt, rank=exit_.rank)
        reason = result.reason or result.node_leaves
        self._add("attempt_ended", reason, node=index, attempt=result.attempt, outcome=result.outcome)

    # The end.

    def add_to_result(self, result: RunResult) -> RunResult:
        """The run has ended. Writes all events; later ones are ignored."""
        last = result.attempts[-1].reason if result.attempts else ""
        text = result.reason or (failure_line(result.first_failure) if result.first_failure else last)
        self._add("run_ended", text, outcome=result.outcome, exit_code=result.exit_code)
        self._file.close()
        return result


class WorkerEvents(Watch):
    """``--event-log-handler console``: shows torchelastic's event of each worker, one JSON object a line.

    The fields are those of ``torch.distributed.elastic.events.api.Event``.
    """

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


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    return (RunEvents(run), *([WorkerEvents(run)] if run.config.output.events == "console" else []))
