"""The run as the user sees it: one agent per node, one console, one verdict.

Runs in the user's process: the ``ddplaunch`` command's, or any that calls ``launch``. The calling thread owns all
state; its only wait is ``mailbox.get``.
"""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch import run_folder
from ddplaunch.errors import LaunchError
from ddplaunch.hang import WorkersAre
from ddplaunch.launcher import ending, preparation, report, requeue, signals
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.collected import Collected
from ddplaunch.launcher.console import Console
from ddplaunch.launcher.failures import NO_ROOM_HINT, HostFailure
from ddplaunch.launcher.gathering import Gathering
from ddplaunch.launcher.handles import AgentConnected, AgentLost, FromNode, FromSweep, LogData, Node
from ddplaunch.launcher.hangs import Hangs
from ddplaunch.launcher.heartbeats import Heartbeats
from ddplaunch.launcher.losses import Losses
from ddplaunch.launcher.nodes import Nodes
from ddplaunch.launcher.signals import Signalled
from ddplaunch.launcher.starting import injector_for, starter_for
from ddplaunch.launcher.stopping import AGENT_OVERTIME_S, Stopping
from ddplaunch.launcher.telling import Telling
from ddplaunch.logs import LogsFound, LogsSent
from ddplaunch.mailbox import Mailbox
from ddplaunch.records import (
    AgentEnded,
    AgentFailed,
    AgentReady,
    AgentSignalled,
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    Notice,
    Pong,
    RendezvousGone,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.agent_process import AgentProcess
    from ddplaunch.model import AttemptResult, RunResult

_PATIENCE_S = 5.0
"""For agents that have told their end, or are lost, to be gone."""


def run(config: LaunchConfig, run_id: str, mark: str, ahead: AgentProcess | None, stdout_fd: int) -> RunResult:
    """As ``launching.launch``, with what that has given the run and has started."""
    mailbox: Mailbox[object] = Mailbox()
    suspends = ("SIGTSTP",) if config.hosts and not config.dry_run else ()
    with signals.posted((*config.signals, *signals.PASSED_ON, *suspends), mailbox.post):
        state = _Run(config, run_id, mark, ahead, mailbox, stdout_fd)
        with run_folder.released(state.folder):
            return state.run()


class _Run:
    """The state of one run."""

    def __init__(
        self,
        config: LaunchConfig,
        run_id: str,
        mark: str,
        ahead: AgentProcess | None,
        mailbox: Mailbox[object],
        stdout_fd: int,
    ) -> None:
        self._config, self._run_id, self._mailbox = config, run_id, mailbox
        self.folder, complaint = preparation.make_folder(config, run_id)
        try:
            self._console = Console(preparation.style(config, self.folder), stdout_fd)
        except RuntimeError as error:  # "can't start new thread"
            raise LaunchError(f"no room to start: {error}", NO_ROOM_HINT) from None
        self._telling = Telling(config, run_id, self.folder, self._console)
        if complaint:
            self._telling.say(complaint, -1)
        self._started_s = time.monotonic()
        self._attempts, self._heartbeats = Attempts(), Heartbeats(config.lost_after_s)
        starter = starter_for(config, run_id, mark, self.folder, self._console, mailbox.post, ahead)
        self._injector = injector_for(config, mark, starter, self._heartbeats)
        meeting = preparation.meeting(config, mark) if config.is_led else None
        # Started once per node, this launcher has but the one that it is on.
        nnodes = (1, 1) if config.meeting else (config.min_nodes, config.max_nodes)
        self._nodes = Nodes(starter, *nnodes, meeting, self._attempts, self._telling.say)
        self._hangs = Hangs(self._nodes)
        self._gathering = Gathering(self._nodes, self._telling, self._injector)
        self._collected = Collected(preparation.logs_folder(config, self.folder), self._nodes, self._telling)
        self._stopping = Stopping(config, self._nodes, self._injector, self._collected, self._telling)
        parts = (self._nodes, self._attempts, self._heartbeats, self._stopping)
        self._losses = Losses(*parts, self._all_ended, self._telling.say)

    def run(self) -> RunResult:
        patience_s = _PATIENCE_S
        try:
            self._telling.begins()
            self._guarded(self._nodes.start)
            while not self._nodes.are_over:
                acts = (self._injector.act(), self._gathering.act(), self._collected.act())  # They may begin a beat.
                deadline = min(*acts, self._stopping.deadline, self._nodes.sweep_deadline, self._heartbeats.deadline)
                event = self._mailbox.get(deadline)
                if event is not None:
                    self._guarded(partial(self._apply, event))
                else:
                    self._stopping.give_up_silent(time.monotonic())
                    self._nodes.give_up_sweeps(time.monotonic())
                self._losses.lose_silent(is_behind=not self._mailbox.is_empty)
        except BaseException:  # A signal that is not ours, or a bug: all agents have yet to stop their workers.
            patience_s += self._config.shutdown_timeout_s + AGENT_OVERTIME_S
            raise
        finally:
            self._nodes.close(patience_s)
        self._all_ended(self._attempts.close())
        return self._finish()

    def _guarded(self, step: Callable[[], None]) -> None:
        """What cannot be gone on with ends the run, of which all agents must hear."""
        try:
            step()
        except LaunchError as error:
            self._stopping.fail_by(error)

    # Events.

    def _apply(self, event: object) -> None:
        match event:
            case Signalled(signum=signal.SIGTSTP):
                self._heartbeats.suspend(time.monotonic(), self._nodes.running)
            case Signalled(signum=signum):
                self._stopping.signalled(signum)
            case FromNode(index=index, event=record):
                self._heard(self._nodes.all[index], record)
            case FromSweep(index=index, event=record):
                self._nodes.swept(self._nodes.all[index], record)

    def _heard(self, node: Node, event: object) -> None:
        self._injector.hear(node, event)
        match event:
            case AgentEnded(left=left):
                node.left = left
            case _ if node.state == "ended" or (node.state == "lost" and not isinstance(event, AgentLost)):
                pass
            case AgentConnected(facts=facts):
                self._nodes.connected(node, facts)
                self._heartbeats.begin(node, time.monotonic(), preparation.SLOW_START_S)
                self._nodes.meet()
            case HostFailure():
                self._nodes.failed(node, event)
            case AgentReady(local_world_size=nproc):
                self._gathering.ready(node.index, nproc)
            case AttemptStarted(attempt=attempt):
                is_first, completed = self._attempts.started(attempt, self._nodes.seats)
                self._all_ended(completed)
                if self._nodes.place:
                    self._nodes.place.round_formed()
                if is_first:
                    self._telling.say(f"{report.ranks(range(event.world_size))} run, attempt {attempt}", 1)
            case AttemptEnded(result=result):
                self._all_ended(self._attempts.over(node.index, result, self._nodes.seats))
            case AgentSignalled(signum=signum):
                self._stopping.signalled(signum, node)
            case WorkersAre():
                self._hangs.hear(node, event)
            case Pong():
                self._heartbeats.heard(node, time.monotonic())
            case LogsFound() | LogData() | LogsSent():
                self._collected.hear(node, event)
                self._losses.left(node)
            case Notice(text=text, level=level):
                self._telling.say(text, level)
            case EndpointOpen() if self._nodes.place:
                self._nodes.place.opened(event)
                self._nodes.meet()
            case RendezvousGone() if not self._is_ending:
                self._nodes.rendezvous_gone(node, event)
            case AgentFailed() if self._nodes.place and self._attempts.are_decided:  # A spare that has come too late.
                self._telling.say(event.message, 0)
            case AgentFailed() if self._nodes.can_do_without(node) and not self._is_ending:
                self._nodes.failed(node, HostFailure(node.host, "agent", event.message, event.hint))
                self._all_ended(self._attempts.lost(node.index))
            case AgentFailed():
                self._stopping.fail(event)
            case AgentLost():
                self._losses.gone(node)

    def _all_ended(self, results: Iterable[AttemptResult]) -> None:
        for result in results:
            self._telling.attempt_ended(result, self._attempts.restarts, goes_on=not self._stopping.is_on)

    # The end.

    @property
    def _is_ending(self) -> bool:
        """Nothing is to be started any more: the verdict is there, or the end is wanted."""
        return self._stopping.is_on or self._attempts.are_decided

    def _finish(self) -> RunResult:
        failed, lost = self._stopping.failed, self._nodes.lost_ones
        result = ending.result(
            run_id=self._run_id,
            attempts=self._attempts.ended,
            failed=failed,
            signals=self._stopping.signals,
            left=self._nodes.left,
            unasked=tuple(node.host for node in lost if node.left is None),
            duration_s=time.monotonic() - self._started_s,
            run_dir=str(self.folder) if self.folder else None,
            accounts=self._injector.accounts,
            job=self._config.job,
        )
        interrupted = partial(self._stopping.has_more_signals, self._mailbox, len(self._stopping.signals))
        self._collected.close()
        self._telling.end(result, is_explained=bool(failed))
        requeue.settle(result, self._telling.say)
        self._telling.drain(result, interrupted)
        if failed:
            left = f"; left: {report.left(result)}" if lost else ""
            raise LaunchError(f"{failed.message}{left}", failed.hint, failed.exit_code)
        return result
