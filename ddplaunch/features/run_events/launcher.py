"""What happened in a run, and when: writes events.jsonl, and shows torchelastic's worker events.

Runs in the launcher: the main thread notes events, and reading threads the first output; a thread writes them. All
times are by this machine's clock; what another host reports gets the moment of its arrival.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddplaunch.features.runs.run_json import EVENTS
from ddplaunch.launcher.display.failure_page import failure_line
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.launcher_agent import AgentEnded, AgentReady, AttemptEnded, AttemptStarted, Output, Report
from ddplaunch.system.files import kept_files
from ddplaunch.threads import in_thread
from ddplaunch.transport.handle import NodeFacts, WriteOutput

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from ddplaunch.protocol.results import AttemptResult, WorkerExit
    from ddplaunch.protocol.run_result import RunResult

SCHEMA = 1
"""Version of the keys, in the first line of a file. New kinds and keys may be added without a change."""

MAX_BYTES = 16 << 20
"""Of the file."""

_MAX_QUEUED = 20_000
_MAX_TEXT = 2000
_LAST_EVENTS_S = 1.0

Event = dict[str, object]
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
            case NodeFacts():
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


# events.jsonl.


class EventFile:
    """The file, and the thread that writes it behind a bounded queue.

    A disk that is full or slow costs events, which are counted, and nothing else. Without a folder, or where no file
    can be made, events are ignored.
    """

    def __init__(self, folder: Path | None) -> None:
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._fd, self._nbytes, self._lost = -1, 0, 0
        self._is_at_line_end = True
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        if folder:
            with contextlib.suppress(RuntimeError), kept_files.noting(folder / EVENTS):  # The limit of threads.
                self._fd = kept_files.open_to_append(folder / EVENTS)  # Stays open if the folder is moved.
                self._thread = in_thread("events", self._run)

    def add(self, event: Event) -> None:
        """Queue a line. Any thread; never blocks."""
        if self._thread is None:
            return
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(event)
        else:
            self._lost += 1

    def close(self) -> None:
        """Write what is queued, for up to ``_LAST_EVENTS_S``, and end the thread."""
        if self._thread:
            self._queue.put(None)
            self._thread.join(_LAST_EVENTS_S)

    # In the thread.

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            self._write(event)
        if self._lost and self._nbytes <= MAX_BYTES:
            self._try_to_write(self._told_losses(round(time.time(), 3)))
        if self._error:
            kept_files.note_fd(self._fd, self._error)
        kept_files.close(self._fd)

    def _write(self, event: Event) -> None:
        is_last = event.get("event") == "run_ended"
        if self._nbytes > MAX_BYTES and not is_last:
            return
        data = self._told_losses(event.get("t")) + _encode(event)
        if self._nbytes + len(data) > MAX_BYTES and not is_last:
            data = _encode({"t": event.get("t"), "event": "limit"})
            self._nbytes = MAX_BYTES + 1
        self._try_to_write(data)

    def _told_losses(self, t: object) -> bytes:
        """The line about the events that were dropped; empty if none were."""
        return _encode({"t": t, "event": "dropped", "count": self._lost}) if self._lost else b""

    def _try_to_write(self, data: bytes) -> None:
        try:
            kept_files.keep_free(self._fd, len(data))
            self._write_all(data)
            self._lost = 0
        except OSError as error:
            self._lost += 1
            self._error = error

    def _write_all(self, data: bytes) -> None:
        data = data if self._is_at_line_end else b"\n" + data
        while data:
            count = os.write(self._fd, data)
            self._nbytes += count
            self._is_at_line_end = data[count - 1 : count] == b"\n"
            data = data[count:]


def _encode(event: Event) -> bytes:
    known = {key: value for key, value in event.items() if value is not None}
    if isinstance(text := known.get("text"), str):
        known["text"] = text[:_MAX_TEXT]
    return json.dumps(known, separators=(",", ":")).encode() + b"\n"


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    return (RunEvents(run), *([WorkerEvents(run)] if run.config.output.events == "console" else []))
