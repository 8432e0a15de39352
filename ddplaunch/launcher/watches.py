"""The watches of a run: parts that follow what its nodes report, and advise, report or answer, but run no attempt.

Runs in the launcher, in the main thread. ``Run`` calls each method of all watches, in the order of ``FEATURES``, and
names none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch import features
from ddplaunch.protocol.control import RequestRefused, RunStops, StopRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.errors import LaunchError
    from ddplaunch.launcher.control_socket import ControlRequest
    from ddplaunch.launcher.display.messages import UserMessages
    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.launcher.pings import Pings
    from ddplaunch.launcher.run_files.run_events import RunEvents
    from ddplaunch.launcher.shutdown import Shutdown
    from ddplaunch.protocol.control import Request
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult, RunResult
    from ddplaunch.transport.handle import WriteOutput

NEVER = float("inf")


class RunServices(NamedTuple):
    """What a run offers its watches.

    Attributes:
        config: the settings of the run.
        run_tag: that of the run.
        nodes: the nodes whose agents this launcher starts.
        participants: those that take part, and their spares.
        pings: those to agents on other machines; a watch may have another node pinged.
        shutdown: ends the run.
        messages: shows messages to the user; it knows the console.
        events: writes events.jsonl.
        folder: returns the run folder; None if no files are kept.
        post: appends an event to the launcher's mailbox; any thread may call it.
    """

    config: LaunchConfig
    run_tag: str
    nodes: Nodes
    participants: Participants
    pings: Pings
    shutdown: Shutdown
    messages: UserMessages
    events: RunEvents
    folder: Callable[[], Path | None]
    post: Callable[[object], None]


class RunEnd(NamedTuple):
    """A run whose result has been shown.

    Attributes:
        result: it.
        error: the reason of a failure other than a worker's.
        lost: of each lost node, by its host: why.
        is_interrupted: whether the user does not want to wait any longer.
    """

    result: RunResult
    error: LaunchError | None
    lost: Mapping[str, str]
    is_interrupted: Callable[[], bool]


class Watch:
    """One part of a run, of all attempts. A method that a watch does not define does nothing."""

    def on_output(self, write: WriteOutput) -> WriteOutput:
        """What is called with all output of workers, in any thread: ``write``, or a function that also calls it."""
        return write

    def on_nodes_ready(self, workers: Mapping[str, int]) -> None:
        """All nodes are ready. ``workers``: their number on each host.

        Raises:
            LaunchError: the run cannot go on.
        """

    def on_event(self, index: int, participants: Sequence[int], event: object) -> None:
        """An event of node ``index``, before ``Run`` handles it; ``participants`` are the nodes of this launcher."""

    def on_posted(self, event: object) -> bool:
        """Handle an event that a thread of this watch has posted. Returns whether it was one of this watch's."""
        return False

    def refuses(self, request: Request) -> str:
        """Why the run cannot do now what ``request`` asks another watch for; empty if this watch knows no reason."""
        return ""

    def on_request(self, request: ControlRequest) -> bool:
        """Answer a request on the control socket if it is one of this watch's. Returns whether it was."""
        return False

    def explain(self, result: AttemptResult, evidence: Sequence[Report]) -> AttemptResult:
        """``result`` of all nodes, explained by what the agents' parts have sent with it (``Part.evidence``)."""
        return result

    def run_due(self, now: float) -> float:
        """Do what is due at ``now`` (``time.monotonic()``). Returns when to call again at the latest, or infinity."""
        return NEVER

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """In the ``with`` block this process is suspended."""
        return contextlib.nullcontext()

    def failure(self, last: AttemptResult, incomplete: Mapping[str, str]) -> LaunchError | None:
        """Why the run has failed although its ``last`` attempt may have not; None if this watch knows no reason.

        ``incomplete`` is as in ``LogCollector``: by host, why not all of its files have been copied.
        """
        return None

    def on_agents_ended(self, result: RunResult) -> RunResult:
        """Write what is left. Returns ``result`` with what this watch has found; the report is not yet written."""
        return result

    def report_lines(self, result: RunResult) -> Sequence[str]:
        """Lines for the end of report.txt, which only a failed run has."""
        return ()

    def on_run_ended(self, end: RunEnd) -> None:
        """The result has been shown. Begin what follows; only the user can interrupt it."""

    def finish(self, end: RunEnd) -> None:
        """Wait for what ``on_run_ended`` has begun. The last call."""

    def close(self) -> None:
        """The loop has ended, perhaps by an unexpected error: end threads, give the terminal back."""


class Watches:
    """All watches of one run."""

    def __init__(self, run: RunServices) -> None:
        self._run = run
        self.all: tuple[Watch, ...] = tuple(
            watch for module in features.loaded("launcher") for watch in module.watches(run)
        )

    def on_output(self, write: WriteOutput) -> WriteOutput:
        """``write``, preceded by what the watches do with the output of workers."""
        for watch in self.all:
            write = watch.on_output(write)
        return write

    def on_nodes_ready(self, workers: Mapping[str, int]) -> None:
        """All nodes are ready; raises LaunchError if the run cannot go on."""
        for watch in self.all:
            watch.on_nodes_ready(workers)

    def on_node_event(self, index: int, event: object) -> None:
        """An event of node ``index``, before ``Run`` handles it."""
        for watch in self.all:
            watch.on_event(index, self._run.participants.indices, event)

    def on_posted(self, event: object) -> None:
        """An event that a watch's thread has posted."""
        any(watch.on_posted(event) for watch in self.all)

    def on_request(self, request: ControlRequest) -> None:
        """A request on the control socket: answered now or later."""
        if request.request.run_tag != self._run.run_tag:
            request.answer(RequestRefused("another run of this process"))
        elif isinstance(request.request, StopRun):
            request.answer(RunStops())
            self._run.shutdown.on_stop_request()
        elif reason := next(filter(None, (watch.refuses(request.request) for watch in self.all)), ""):
            request.answer(RequestRefused(reason))
        elif not any(watch.on_request(request) for watch in self.all):
            request.answer(RequestRefused("not a request that this version knows"))

    def explain(self, result: AttemptResult, evidence: Sequence[Report]) -> AttemptResult:
        """``result`` of an attempt, as all watches explain it."""
        for watch in self.all:
            result = watch.explain(result, evidence)
        return result

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """In the ``with`` block this process is suspended."""
        with contextlib.ExitStack() as stack:
            for watch in self.all:
                stack.enter_context(watch.suspended())
            yield

    def failure(self, attempts: Sequence[AttemptResult], incomplete: Mapping[str, str]) -> LaunchError | None:
        """Why the run has failed, if not by a worker, as the first watch says that knows a reason."""
        failures = (watch.failure(attempts[-1], incomplete) for watch in self.all if attempts)
        return next(filter(None, failures), None)

    def on_agents_ended(self, result: RunResult) -> RunResult:
        """All agents have ended. Returns ``result`` with what all watches have found."""
        for watch in self.all:
            result = watch.on_agents_ended(result)
        return result

    def report_lines(self, result: RunResult) -> list[str]:
        """The lines of all watches for the end of report.txt."""
        return [line for watch in self.all for line in watch.report_lines(result)]

    def on_run_ended(self, end: RunEnd) -> None:
        """The result has been shown: do what follows, and wait for it, and for the console."""
        for watch in self.all:
            watch.on_run_ended(end)
        self._run.messages.drain(end.result, end.is_interrupted)
        for watch in self.all:
            watch.finish(end)

    def close(self) -> None:
        """End what the watches hold; an error of one keeps no other from it."""
        with contextlib.ExitStack() as stack:
            for watch in self.all:
                stack.callback(watch.close)
