"""The watches of a run: parts that follow what its nodes report, and advise, report or answer, but run no attempt.

Runs in the launcher, in the main thread. ``Run`` calls each method of all watches, in the order of ``FEATURES``, and
names none. ``Timers`` calls all parts of a run that have a deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ddplaunch import features
from ddplaunch.mailbox import NEVER, Mailbox
from ddplaunch.protocol.launcher_agent import Order, OrderToNodes, Output, Report, ReportOfNode

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.errors import LaunchError
    from ddplaunch.launcher.display.messages import UserMessages
    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.launcher.pings import Pings
    from ddplaunch.launcher.shutdown import Shutdown
    from ddplaunch.protocol.control import Request
    from ddplaunch.protocol.results import AttemptResult
    from ddplaunch.protocol.run_result import RunResult
    from ddplaunch.transport.handle import WriteOutput

_FROZEN_S = 1.0
"""Delay of a deadline that shows that this process or its machine was suspended."""

_CATCH_UP_S = 5.0
_BUSY_S = 0.02
"""While events wait, the parts run no more often: each looks at all of its deadlines."""


Reply = Callable[[object], None]
"""Gives another process of the user the one record that answers its request on the control socket. Any thread."""


class RunServices(NamedTuple):
    """What a run offers its watches.

    Attributes:
        config: the settings of the run.
        run_tag: the run tag, by which processes of the run are found.
        nodes: the nodes whose agents this launcher starts.
        participants: those that take part, and their spares.
        pings: those to agents on other machines; a watch may have another node pinged.
        shutdown: ends the run.
        messages: shows messages to the user; it knows the console.
        note: notes an event of the run, as ``Watches.note``; any thread may call it.
        folder: returns the run folder; None if no files are kept.
        post: has the main thread call a function, when it has handled what came before; also at the end of the run,
            until ``Watch.on_loop_ended``. Any thread may call it.
        ask: has the watches answer a request on the control socket. Returns whether one does, now or later.
    """

    config: LaunchConfig
    run_tag: str
    nodes: Nodes
    participants: Participants
    pings: Pings
    shutdown: Shutdown
    messages: UserMessages
    note: Callable[..., None]
    folder: Callable[[], Path | None]
    post: Callable[[Callable[[], object]], None]
    ask: Callable[[Request, Reply], bool]

    def send_to_all(self, order: Order) -> None:
        """Send an order to all nodes of the job, also to those of other launchers."""
        self.nodes.send(OrderToNodes(order) if self.config.each_node_has_launcher else order)


class RunEnd(NamedTuple):
    """A run whose result has been shown.

    Attributes:
        result: what the run has come to, as in report.json.
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
        """Returns the function that gets all output of workers in place of ``write``, in any thread.

        It is ``write`` itself, or a function that calls ``write`` with what is to be shown.
        """
        return write

    def on_nodes_ready(self, workers: Mapping[str, int]) -> None:
        """All nodes are ready. ``workers``: their number on each host.

        Raises:
            LaunchError: the run cannot go on.
        """

    def on_event(self, index: int, event: object) -> None:
        """An event of a node of this launcher, before ``Run`` handles it; ``index`` is that in ``Nodes.all``."""

    def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
        """A report of a node of the job, of this launcher or another; ``participants`` are the indices of all nodes.

        Where each node has a launcher, ``node_index`` is no index of ``Nodes.all``. Do not give it to
        ``RunServices.note``; give the ``host`` of the report as a fact.
        """

    def on_note(self, event: str, text: str, t: float | None, node: int | None, facts: Mapping[str, object]) -> None:
        """Something has happened that a chronicle of the run should have; as ``Watches.note``."""

    def on_request(self, request: Request, reply: Reply) -> bool:
        """Answer a request on the control socket, now or later, if it is one of this watch's. Returns whether it was.

        A watch may also refuse what the run cannot do now, before the watch that would do it is asked.
        """
        return False

    def explain(self, result: AttemptResult, evidence: Sequence[Report]) -> AttemptResult:
        """``result`` of all nodes, explained by what the agents' parts have sent with it (``Part.evidence``).

        In another thread, for which the main thread waits; it handles only signals meanwhile.
        """
        return result

    def run_due(self, now: float) -> float:
        """Do what is due at ``now`` (``time.monotonic()``). Returns when to call again at the latest, or ``NEVER``.

        Called after every event, too: a method that sets the time for something needs no further call.
        """
        return NEVER

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Prepare for a suspension by Ctrl-Z: this process sleeps within the ``with`` block, and goes on after it."""
        return contextlib.nullcontext()

    def on_stop(self, signum: int) -> bool:
        """The user stops the run. If all workers have ended, and only this watch is still busy: stop it, return True.

        False: the run is stopped as always.
        """
        return False

    def after_stop(self, signum: int) -> str:
        """What follows if this signal stops the run, for the message; a scheduler may send it to several processes."""
        return ""

    def on_loop_ended(self) -> None:
        """``Run`` handles no more events: all agents have ended, or there was an unexpected error. Stop what you do."""

    def failure(self, last: AttemptResult) -> LaunchError | None:
        """Why the run has failed although its ``last`` attempt may have not; None if this watch knows no reason."""
        return None

    def add_to_result(self, result: RunResult) -> RunResult:
        """Finish your own files. Returns ``result`` with the fields that this watch fills; the report follows."""
        return result

    def page_lines(self, result: RunResult) -> Sequence[str]:
        """Lines for the failure page, below why the job has failed. The page escapes them."""
        return ()

    def report_lines(self, result: RunResult) -> Sequence[str]:
        """Lines for report.txt, below the failure page, which are too many for the console. They are escaped."""
        return ()

    def on_run_ended(self, end: RunEnd) -> None:
        """The result is shown and written. Show a last line, or begin what may take long; ``finish`` waits for it."""

    def finish(self, end: RunEnd) -> None:
        """Wait for what ``on_run_ended`` has begun. The last call; a message here needs its own ``messages.drain``."""


class Watches:
    """All watches of one run. There are none until ``begin``."""

    all: tuple[Watch, ...] = ()

    def __init__(self, write: WriteOutput) -> None:
        """``write`` shows the output of workers."""
        self._write = write

    def begin(self, run: RunServices) -> None:
        """Make the watches that this run has."""
        self._run = run
        self._set(tuple(watch for module in features.watch_modules(run.config) for watch in module.watches(run)))
        for watch in self.all:
            self._write = watch.on_output(self._write)

    def _set(self, watches: tuple[Watch, ...]) -> None:
        self.all = watches
        # Thousands of nodes answer a ping each second, and most watches wait for no event.
        self._on_event = [watch.on_event for watch in self.all if type(watch).on_event is not Watch.on_event]
        self._on_report = [watch.on_report for watch in self.all if type(watch).on_report is not Watch.on_report]

    def output(self, header: Output, data: bytes) -> None:
        """Show output of a worker, after the watches have done with it what they do. Any thread."""
        self._write(header, data)

    def on_nodes_ready(self, workers: Mapping[str, int]) -> None:
        """All nodes are ready; raises LaunchError if the run cannot go on."""
        for watch in self.all:
            watch.on_nodes_ready(workers)

    def on_node_event(self, index: int, event: object) -> None:
        """An event of node ``index``, before ``Run`` handles it.

        An error of one watch keeps the event from no other. The first error is raised when all have been told.
        """
        told: Iterable[Callable[[], None]]
        match event:
            case ReportOfNode():
                told = [partial(tell, event.node_index, event.participants, event.report) for tell in self._on_report]
            case Report():
                told = [partial(tell, index, self._run.participants.indices, event) for tell in self._on_report]
            case _:
                told = [partial(tell, index, event) for tell in self._on_event]
        errors = []
        for tell in told:
            try:
                tell()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def note(
        self, event: str, text: str = "", t: float | None = None, node: int | None = None, **facts: object
    ) -> None:
        """Note an event of the run. Any thread; never blocks.

        ``event``: a kind that the package of a feature declares in ``EVENTS``; of the core's, ``run_events`` does.
        ``t``: when, in seconds since 1970; None: now. ``node``: the index of the node that it is about, one of this
        launcher (``Watch.on_event``). An event about a node of ``Watch.on_report`` has its ``host`` among the facts.
        """
        for watch in self.all:
            watch.on_note(event, text, t, node, facts)

    def on_request(self, request: Request, reply: Reply) -> bool:
        """Whether a watch answers a request on the control socket."""
        return any(watch.on_request(request, reply) for watch in self.all)

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

    def on_stop(self, signum: int) -> bool:
        """The user stops the run. Returns whether a watch has stopped all that is left of it."""
        return any(watch.on_stop(signum) for watch in self.all)

    def after_stop(self, signum: int) -> str:
        """What follows if this signal stops the run, as the first watch says that begins something; empty: nothing."""
        return next(filter(None, (watch.after_stop(signum) for watch in self.all)), "")

    def on_loop_ended(self) -> None:
        """``Run`` handles no more events. An error of one watch keeps no other from its end."""
        with contextlib.ExitStack() as stack:
            for watch in self.all:
                stack.callback(watch.on_loop_ended)

    def failure(self, attempts: Sequence[AttemptResult]) -> LaunchError | None:
        """Why the run has failed, if not by a worker, as the first watch says that knows a reason."""
        failures = (watch.failure(attempts[-1]) for watch in self.all if attempts)
        return next(filter(None, failures), None)

    def add_to_result(self, result: RunResult) -> RunResult:
        """``result`` with what all watches have found."""
        for watch in self.all:
            result = watch.add_to_result(result)
        return result

    def page_lines(self, result: RunResult) -> list[str]:
        """The lines of all watches for the failure page."""
        return [line for watch in self.all for line in watch.page_lines(result)]

    def report_lines(self, result: RunResult) -> list[str]:
        """The lines of all watches for report.txt, below the failure page."""
        return [line for watch in self.all for line in watch.report_lines(result)]

    def on_run_ended(self, end: RunEnd) -> None:
        """The result has been shown: do what follows, and wait for it, and for the console."""
        for watch in self.all:
            watch.on_run_ended(end)
        self._run.messages.drain(end.result, end.is_interrupted)
        for watch in self.all:
            watch.finish(end)


class Timed(Protocol):
    """A part of a run with a deadline."""

    def run_due(self, now: float) -> float:
        """Do what is due at ``now`` (``time.monotonic()``). Returns when to call again at the latest, or infinity."""


class Timers:
    """Runs the parts of a run that are due, also under an uninterrupted stream of events.

    After a suspension (SIGSTOP, Ctrl-Z, a suspended laptop), deadlines have passed although the events before them may
    wait in the mailbox. The launcher handles these events first, for up to ``_CATCH_UP_S``; the pings go on
    meanwhile, in their own thread.
    """

    def __init__(
        self,
        pings: Timed,
        parts: Sequence[Timed],
        mailbox: Mailbox[object],
        on_error: Callable[[Timed, Exception], None],
    ) -> None:
        """``parts`` run in this order, after the pings, which may suspend this process.

        ``on_error`` is called with a part that has raised an exception; it is not called again.
        """
        self._pings = pings
        self._parts = parts
        self._mailbox = mailbox
        self._on_error = on_error
        self._failed: list[Timed] = []
        self._deadline = float("inf")
        self._catch_up_by, self._ran_at = 0.0, -NEVER

    def run_due(self) -> float:
        """Run the parts that are due. Returns the time until which the loop may wait for an event."""
        now = time.monotonic()
        if now < self._ran_at + _BUSY_S and not self._mailbox.is_empty:
            return now
        ping_at = self._call(self._pings, now)
        now = self._ran_at = time.monotonic()
        if now - self._deadline > _FROZEN_S:
            self._catch_up_by = self._deadline = now + _CATCH_UP_S
        if now < self._catch_up_by and not self._mailbox.is_empty:
            return now
        self._deadline = min(ping_at, *(self._call(part, now) for part in self._parts))
        return self._deadline

    def _call(self, part: Timed, now: float) -> float:
        if part in self._failed:
            return NEVER
        try:
            return part.run_due(now)
        except Exception as error:
            self._failed.append(part)
            self._on_error(part, error)
            return NEVER
