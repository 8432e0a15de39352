"""What happened in a run, and when: writes events.jsonl. See ``protocol.run_events`` for the kinds.

Runs in the launcher: the main thread reports events, and reading threads the first output. All times are by this
machine's clock; what another host reports gets the moment of its arrival.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.launcher.display.event_file import EventFile
from ddplaunch.launcher.display.failure_page import failure_line
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.launcher_agent import AgentEnded, AgentReady, AttemptEnded, AttemptStarted
from ddplaunch.protocol.run_events import SCHEMA
from ddplaunch.transport.handle import AgentConnected

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddplaunch.errors import LaunchError
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.protocol.results import AttemptResult, RunResult
    from ddplaunch.transport.handle import WriteOutput

_MAX_FAILURES = 20


class RunEvents:
    """The events of one run."""

    def __init__(self, folder: Path | None, run_id: str, host_of: Callable[[int], str]) -> None:
        """``folder``: the run's; None: no file. ``host_of`` returns the host of a node, by its index."""
        self._file, self._host_of = EventFile(folder), host_of
        self._started_s: dict[tuple[int, int], float] = {}
        self._has_started = False
        self._heard: set[tuple[int, str]] = set()
        self.add("run_started", schema=SCHEMA, text=run_id)

    def add(self, event: str, text: str = "", t: float | None = None, **facts: object) -> None:
        """Write an event of this kind; ``t`` in seconds since 1970, now if it is None. Any thread; never blocks."""
        moment = round(time.time() if t is None else t, 3)
        first = {"schema": facts.pop("schema")} if "schema" in facts else {}
        self._file.add({**first, "t": moment, "event": event, **facts, **({"text": text} if text else {})})

    def of_node(self, event: str, index: int, text: str = "", t: float | None = None, **facts: object) -> None:
        """As ``add``, for an event of node ``index``."""
        self.add(event, text, t, node=index, host=self._host_of(index), **facts)

    def message(self, text: str, level: int, kind: str = "message") -> None:
        """A message to the user; of another ``kind`` if it is about such an event."""
        self.add(kind, text, **({"level": level} if kind == "message" else {}))

    def noting_first(self, output: WriteOutput) -> WriteOutput:
        """``output``, which also notes the first output of each node in an attempt."""

        def write(header: Output, data: bytes) -> None:
            if (header.attempt, header.host) not in self._heard:
                self._heard.add((header.attempt, header.host))
                self.add("first_output", attempt=header.attempt, host=header.host, rank=header.rank)
            output(header, data)

        return write

    # Events of nodes.

    def on_event(self, index: int, event: object) -> None:
        """An event of node ``index``. Other events have no effect."""
        match event:
            case AgentConnected():
                self.of_node("agent_connected", index)
            case AgentReady(local_world_size=workers):
                kind = "node_joined" if self._has_started else "agent_ready"
                self.of_node(kind, index, workers=workers)
            case AttemptStarted():
                self._on_started(index, event)
            case AttemptEnded(result=result):
                self._on_ended(index, result)
            case AgentEnded():
                self.of_node("node_left", index)

    def _on_started(self, index: int, event: AttemptStarted) -> None:
        self._has_started, self._started_s[index, event.attempt] = True, time.time()
        self.of_node(
            "attempt_started",
            index,
            attempt=event.attempt,
            workers=len(event.pids),
            first_rank=event.first_rank,
            world_size=event.world_size,
            import_s=round(event.import_s, 3),
        )

    def _on_ended(self, index: int, result: AttemptResult) -> None:
        # The agent reports exits at the end of the attempt: when they happened follows from how long the workers ran.
        started_s = self._started_s.pop((index, result.attempt), None)
        if started_s is None and result.exits:  # A worker has failed before all of them ran.
            self._on_half_started(index, result)
        for exit_ in first_failure.failures(result.exits)[:_MAX_FAILURES]:
            ended_s = None if started_s is None else min(time.time(), started_s + exit_.duration_s)
            self.of_node("worker_failed", index, failure_line(exit_), ended_s, attempt=result.attempt, rank=exit_.rank)
        reason = result.reason or result.node_leaves
        self.of_node("attempt_ended", index, reason, attempt=result.attempt, outcome=result.outcome)

    def _on_half_started(self, index: int, result: AttemptResult) -> None:
        first_rank, started_s = min(exit_.rank for exit_ in result.exits), time.time() - result.duration_s
        facts = {"attempt": result.attempt, "workers": len(result.exits), "first_rank": first_rank}
        self.of_node("attempt_started", index, "", started_s, **facts)

    # The end.

    def ended(self, result: RunResult, error: LaunchError | None) -> None:
        """The run has ended. Writes all events; later ones are ignored."""
        last = result.attempts[-1].reason if result.attempts else ""
        text = error.message if error else failure_line(result.first_failure) if result.first_failure else last
        self.add("run_ended", text, outcome=result.outcome, exit_code=error.exit_code if error else result.exit_code)
        self._file.close()
