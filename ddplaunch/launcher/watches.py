"""The watches of a run: parts that follow what its nodes report, and advise, report or answer, but run no attempt.

Runs in the launcher, in the main thread. A watch gets every event of every node, and is run when it is due. A new watch
is one line here; ``Run`` uses only those with a result for its end.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddplaunch.features.come_back import terminal_exit
from ddplaunch.features.debug.launcher import Debugging, TerminalEvent
from ddplaunch.features.hangs.launcher import HangWatch
from ddplaunch.features.hangs.requested_examinations import RequestedExaminations
from ddplaunch.features.health.launcher import HealthWatch
from ddplaunch.features.page.launcher import RunPage
from ddplaunch.features.slow_ranks.launcher import SampleJudged, SlowRanksWatch
from ddplaunch.features.slurm_nodes.launcher import SlurmAnswered, SlurmWatch
from ddplaunch.launcher.control_socket import ControlRequest
from ddplaunch.launcher.timers import Timed
from ddplaunch.protocol.control import LeaveTerminal, RequestRefused, RunStops, StopRun
from ddplaunch.protocol.specs import UsageRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.metrics.launcher import MetricsWatch
    from ddplaunch.features.usage.launcher import UsageWatch
    from ddplaunch.launcher.display.messages import UserMessages
    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.launcher.run_files.run_events import RunEvents
    from ddplaunch.launcher.shutdown import Shutdown


class Watch(Timed, Protocol):
    """Follows the events of all nodes."""

    def on_event(self, index: int, participants: Sequence[int], event: object) -> None:
        """An event of node ``index``; ``participants`` are the nodes of this launcher. Other events have no effect."""


class Watches:
    """All watches of one run."""

    def __init__(
        self,
        config: LaunchConfig,
        run_tag: str,
        nodes: Nodes,
        shutdown: Shutdown,
        messages: UserMessages,
        events: RunEvents,
        folder: Callable[[], Path | None],
        post: Callable[[object], None],
    ) -> None:
        """``folder`` returns the run's; ``post`` appends an event to the mailbox, in any thread."""
        self._nodes, self._shutdown, self._messages, self._run_tag = nodes, shutdown, messages, run_tag
        self._is_local, self._folder = config.is_local, folder
        self._usage: UsageWatch | None = None
        self.hangs = HangWatch(config, nodes.send, folder, messages)
        self.slow_ranks = SlowRanksWatch(config, nodes.send, partial(messages.show, kind="slow_rank"), post)
        self.health = HealthWatch(config, nodes, shutdown, messages.show)
        self._requests = RequestedExaminations(config, run_tag, nodes.send, folder)
        self._slurm = SlurmWatch(config, nodes, post, messages.show)
        advisers = (self.hangs, self._requests, self.slow_ranks, self.health)
        self.debugging = Debugging(config, nodes, shutdown, messages.console, post)
        self.page = RunPage(config, folder)
        self._metrics = _metrics_watch(config, nodes, messages)
        self.all: tuple[Watch, ...] = (events, *advisers, self._slurm, self.debugging, self.page, *self._metrics)

    def on_node_event(self, index: int, event: object) -> None:
        """An event of node ``index``, before ``Run`` handles it."""
        for watch in self.all:
            watch.on_event(index, self._nodes.participants, event)
        if isinstance(event, UsageRecord):
            self._on_usage(index, event)

    def _on_usage(self, index: int, event: UsageRecord) -> None:
        if self._usage is None:
            from ddplaunch.features.usage.launcher import UsageWatch  # A short run does not load it.

            self._usage = UsageWatch(self._nodes, self._folder, is_local=self._is_local)
        self._usage.on_event(index, event)

    def on_event(self, event: object) -> None:
        """An event that a watch's thread, or the control socket, has posted."""
        match event:
            case SampleJudged():
                self.slow_ranks.on_judged(event)
            case SlurmAnswered():
                self._slurm.on_answer(event)
            case TerminalEvent():
                self.debugging.on_terminal(event)
            case ControlRequest():
                self._on_request(event)

    def _on_request(self, request: ControlRequest) -> None:
        if request.request.run_tag != self._run_tag:
            request.answer(RequestRefused("another run of this process"))
        elif isinstance(request.request, StopRun):
            request.answer(RunStops())
            self._shutdown.on_stop_request()
        elif isinstance(request.request, LeaveTerminal):
            is_debugged = self.debugging.has_sessions
            request.answer(terminal_exit.leave_terminal(self._nodes, self._messages, is_debugged=is_debugged))
        else:
            self._requests.on_request(request)

    def close(self, exit_code: int) -> None:
        """The run has ended: write what is left."""
        if self._usage:
            self._usage.close()
        for metrics in self._metrics:
            metrics.close(exit_code)


def _metrics_watch(config: LaunchConfig, nodes: Nodes, messages: UserMessages) -> tuple[MetricsWatch, ...]:
    if not config.output.metrics_file:
        return ()
    from ddplaunch.features.metrics.launcher import MetricsWatch  # Few runs wait for the import.

    path = Path(config.output.metrics_file).absolute()
    return (MetricsWatch(path, lambda: messages.run_id, nodes, messages.show),)
