"""A run from its start to its outcome, in one loop: start the agents, handle events, shut down, decide the outcome.

Runs in the user's process: that of the ``ddplaunch`` command, or any that calls ``launch``. The calling thread owns all
state; it waits in ``Mailbox.get`` only. Must not import torch, nor paramiko unless agents are started over SSH.

How to read it: ``Run.run`` is the loop, ``_on_event`` and ``_handle`` are the table of events, then come the methods
for each event in the order of a run's life: start, attempts, end. The loss of nodes is in ``lost_nodes``.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.launcher import outcome, run_facts, setup
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.display.messages import UserMessages
from ddplaunch.launcher.lost_nodes import LostNodes
from ddplaunch.launcher.nodes import Node, Nodes, NodeState
from ddplaunch.launcher.participants import Participants
from ddplaunch.launcher.pings import Pings
from ddplaunch.launcher.record_checks import RecordChecks
from ddplaunch.launcher.shutdown import AGENT_OVERTIME_S, Shutdown
from ddplaunch.launcher.watches import RunEnd, RunServices, Timed, Timers, Watches
from ddplaunch.protocol.launcher_agent import (
    AgentEnded,
    AgentFailed,
    AgentReady,
    AgentSignalled,
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    FirstRoundFormed,
    NeedsRendezvous,
    NodeDetails,
    NodeSilent,
    Notice,
    Pong,
    RunIdAgreed,
)
from ddplaunch.system import run_tags, signals
from ddplaunch.system.files import run_folder
from ddplaunch.text import quote
from ddplaunch.threads import result_of
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import ChannelClosed, FromNode, NodeFacts

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.display.console import Console
    from ddplaunch.mailbox import Mailbox
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult
    from ddplaunch.protocol.run_result import RunResult
    from ddplaunch.transport.agent_process import AgentProcess

_CLOSE_S = 5.0
"""Seconds for the processes of agents that have reported their end, or are lost, to exit."""

_MAX_NOTICE = 1000
"""Characters shown of a notice of an agent."""


class Run:
    """One run: its parts, its loop and its handlers of events. Only the main thread calls it."""

    def __init__(
        self,
        config: LaunchConfig,
        run_id: str,
        run_tag: str,
        early_agent: AgentProcess | None,
        mailbox: Mailbox[object],
        folder: Path | None,
        console: Console,
    ) -> None:
        """``early_agent``: that of a single local node, already started. ``folder``: the run's; None: no files."""
        self._config, self._run_id, self._mailbox, self._folder = config, run_id, mailbox, folder
        self._run_tag, self._marks, self._console = run_tag, contextlib.ExitStack(), console
        self._started_at = time.monotonic()
        self._show_ready: Callable[[], None] = lambda: None
        self._facts = run_facts.write(run_facts.of_this_process(run_id, run_tag, config), folder)
        self._watches = watches = Watches(console.output)
        self._messages = messages = UserMessages(config, run_id, folder, console, watches.note)
        self._show = show = messages.show
        self._attempts = Attempts(self._explain)
        transport = setup.transport_for(config, run_tag, watches.output, mailbox.post, early_agent, console.stdout_fd)
        spec = partial(setup.agent_spec_of_run, config, run_id, folder, transport.node_names)
        self._nodes = nodes = Nodes(transport, spec)
        # Where the nodes meet at an endpoint, each node has a launcher, which starts this node only.
        nnodes = (1, 1) if config.each_node_has_launcher else (config.min_nodes, config.max_nodes)
        rendezvous = setup.rendezvous_settings(config, run_tag) if config.one_launcher_leads else None
        self._participants = participants = Participants(nodes, *nnodes, rendezvous, self._attempts, show)
        self._shutdown = shutdown = Shutdown(config, nodes, messages, watches.on_stop, watches.after_stop)
        show_attempts = self._show_attempts
        self._lost_nodes = LostNodes(config, participants, self._attempts, shutdown, watches.note, show, show_attempts)
        self._checks = RecordChecks(config, participants)
        on_unresponsive = self._lost_nodes.on_unresponsive
        self._pings = pings = Pings(config.timeouts.lost_after_s, mailbox, on_unresponsive, self._suspend)
        services = RunServices(
            config,
            run_tag,
            nodes,
            participants,
            pings,
            shutdown,
            messages,
            note=watches.note,
            folder=lambda: self._folder,
            post=mailbox.post,
            ask=watches.on_request,
        )
        watches.begin(services)
        parts: tuple[Timed, ...] = (shutdown, nodes, *watches.all)
        self._timers = Timers(pings, parts, mailbox, self._on_timer_failed)

    # The loop.

    def run(self) -> RunResult:
        """Run the job to its end; no agent runs when this returns.

        Raises:
            LaunchError: the run failed for a reason other than a failed worker.
        """
        close_s = _CLOSE_S
        try:
            self._messages.run_started()
            with contextlib.closing(self._pings):
                self._start_nodes()
                while not self._nodes.all_finished:
                    if (event := self._mailbox.get(self._timers.run_due())) is not None:
                        with self._errors_stop_the_run():
                            self._on_event(event)
                self._handle_now(callable)
                self._show_attempts(self._attempts.close())
        except BaseException:  # An unhandled signal, or a bug: the agents still have to stop their workers.
            close_s += self._config.timeouts.shutdown_timeout_s + AGENT_OVERTIME_S
            raise
        finally:
            self._marks.callback(self._nodes.close, close_s)
            self._marks.callback(self._watches.on_loop_ended)
            self._marks.close()
        return self._finish()

    @contextlib.contextmanager
    def _errors_stop_the_run(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._on_error(error)

    def _on_error(self, error: Exception) -> None:
        """Call it while ``error`` is handled. An unexpected one, too, ends the run in order and with its report."""
        if isinstance(error, LaunchError):
            self._shutdown.fail(error)
        else:
            self._shutdown.on_bug(quote(f"{type(error).__name__}: {error}", _MAX_NOTICE))

    def _on_timer_failed(self, part: object, error: Exception) -> None:
        """``part`` is not called again."""
        if part in (self._shutdown, self._nodes):  # Without them, the run may not come to its end.
            raise error
        self._on_error(error)

    def _on_event(self, event: object) -> None:
        match event:
            case signals.SignalReceived(signum=signal.SIGTSTP):
                self._participants.on_suspend()
                self._pings.suspend(time.monotonic())
            case signals.SignalReceived():
                self._shutdown.on_signal(event)
            case FromNode(index=index, event=node_event):
                self._on_node_event(self._nodes.all[index], node_event)
            case _ if callable(event):  # See ``RunServices.post``.
                event()

    def _suspend(self) -> None:
        if signals.can_be_suspended():
            with self._watches.suspended():
                self._messages.suspended(self._nodes.all[0].handle.inherited_fds)
                signals.suspend()

    def _on_node_event(self, node: Node, event: object) -> None:
        """Handle an event of a node's handle; if that fails, ``LostNodes.on_bad_record`` decides."""
        if node.is_ignored and not isinstance(event, ChannelClosed):
            return
        try:
            self._checks.check(node, event)
            self._handle(node, event)
        except LaunchError:
            raise
        except Exception as error:
            self._lost_nodes.on_bad_record(node, event, error)

    def _handle(self, node: Node, event: object) -> None:
        """Handle a record of a node's agent, or a change of its connection."""
        self._watches.on_node_event(node.index, event)
        match event:
            case AgentEnded(unkillable_pids=pids):
                self._on_agent_ended(node, pids)
            case _ if node.state is NodeState.DONE or node.state.is_lost:
                pass
            case NodeFacts():
                self._on_agent_connected(node, event)
            case HostFailure():
                self._lost_nodes.on_host_failure(node, event)
            case AgentReady(local_world_size=local_world_size):
                self._on_agent_ready(node, local_world_size)
            case NodeDetails():
                node.details = event
            case EndpointOpen():
                self._participants.on_endpoint_open(node, event)
            case RunIdAgreed(run_id=run_id):
                self._on_run_id_agreed(run_id)
            case FirstRoundFormed(moved_to=names):
                self._on_first_round_formed(names)
            case AttemptStarted():
                self._on_attempt_started(node, event)
            case AttemptEnded(result=result, evidence=evidence):
                self._on_attempt_ended(node, result, evidence)
            case NeedsRendezvous():
                self._lost_nodes.on_needs_rendezvous(node, event)
            case NodeSilent():
                self._lost_nodes.on_node_silent(node, event)
            case AgentSignalled(signum=signum):
                self._shutdown.on_signal(signals.SignalReceived(signum), node)
            case Pong():
                self._pings.on_pong(node, event, time.monotonic())
            case Notice(text=text, level=level):
                self._show(quote(text, _MAX_NOTICE), level)
            case AgentFailed():
                self._lost_nodes.on_agent_failed(node, event)
            case ChannelClosed():
                self._on_channel_closed(node)

    # The start.

    def _start_nodes(self) -> None:
        """Start all nodes, unless a signal stops the run meanwhile; other events are handled afterwards, in order."""
        waiting: list[object] = []
        with self._errors_stop_the_run():
            for _ in self._participants.start():
                while (event := self._mailbox.get(0.0)) is not None:
                    if isinstance(event, signals.SignalReceived):
                        self._on_event(event)
                    else:
                        waiting.append(event)
                if self._shutdown.in_progress:
                    break
            else:
                self._participants.check_and_announce()
        for event in waiting:
            with self._errors_stop_the_run():
                self._on_event(event)

    def _on_agent_connected(self, node: Node, facts: NodeFacts) -> None:
        self._nodes.on_agent_connected(node, facts)
        self._pings.watch(node, time.monotonic(), setup.SLOW_START_S)
        self._participants.check_and_announce()

    def _on_agent_ready(self, node: Node, local_world_size: int) -> None:
        node.workers = local_world_size
        if by_host := self._participants.on_agent_ready(node):
            self._watches.on_nodes_ready(by_host)
            self._show_ready = partial(self._messages.nodes_ready, by_host)
            if not self._config.each_node_has_launcher:  # Otherwise the folder in the message is not known yet.
                self._show_ready()

    def _on_run_id_agreed(self, run_id: str) -> None:
        """Another launcher's run id, unless the user gave one: take it, and let --ps and --kill find it here."""
        if run_id != self._run_id:
            self._marks.enter_context(run_tags.launcher_memfd(self._run_tag, run_id))
            self._run_id = self._messages.run_id = run_id

    def _on_first_round_formed(self, moved_to: tuple[str, ...]) -> None:
        if self._folder and moved_to:
            self._on_folder_moved(self._folder.parent.joinpath(*moved_to))
        self._facts = run_facts.with_run_id(self._facts, self._run_id, self._folder)
        self._show_ready()

    def _on_folder_moved(self, folder: Path | None) -> None:
        self._folder = folder
        self._messages.folder_moved(folder, setup.console_style(self._config, folder, self._console.stdout_fd))

    # Attempts.

    def _on_attempt_started(self, node: Node, event: AttemptStarted) -> None:
        is_first, completed = self._attempts.on_started(node.index, event.attempt, self._participants.indices)
        self._show_attempts(completed)
        self._participants.on_round_formed(event.attempt)
        self._messages.attempt_started(event, is_first=is_first)

    def _on_attempt_ended(self, node: Node, result: AttemptResult, evidence: Sequence[Report]) -> None:
        was_ending = self._lost_nodes.run_is_ending
        self._show_attempts(self._attempts.on_ended(node.index, result, self._participants.indices, evidence))
        if not was_ending:
            self._participants.leave_if_due(node, result)
        if self._attempts.outcome_is_known:
            self._shutdown.outcome_known_at = min(self._shutdown.outcome_known_at, time.monotonic())

    def _show_attempts(self, completed: Iterable[AttemptResult]) -> None:
        for result in completed:
            # The end of one node begins the shutdown, and another's report of an earlier attempt may still arrive.
            is_last = self._shutdown.in_progress and result.attempt + 1 >= self._attempts.next_number
            self._messages.attempt_ended(result, is_last=is_last)

    def _explain(self, result: AttemptResult, evidence: Sequence[Report]) -> AttemptResult:
        """Explained by all watches. With thousands of ranks that takes seconds: the user's signals act meanwhile."""
        if not evidence:
            return self._watches.explain(result, evidence)
        work = partial(self._watches.explain, result, evidence)
        return result_of("explain", work, self._on_signals, result)

    def _on_signals(self) -> bool:
        """Handle the signals that have arrived, before what else has; at the end of the run they are only counted."""
        if not self._nodes.all_finished:
            self._handle_now(lambda event: isinstance(event, signals.SignalReceived))
        return False

    def _handle_now(self, is_wanted: Callable[[object], bool]) -> None:
        for event in self._mailbox.take(is_wanted):
            with self._errors_stop_the_run():
                self._on_event(event)

    # The end of a node.

    def _on_agent_ended(self, node: Node, unkillable_pids: tuple[int, ...]) -> None:
        """All workers of the node have ended. What features send may follow, then the channel closes."""
        node.unkillable_pids = unkillable_pids
        if node.state is NodeState.RUNNING:
            node.state = NodeState.ENDING
            self._on_node_reported(node)

    def _on_channel_closed(self, node: Node) -> None:
        returncode = node.handle.close()
        if node.state.is_ending:
            node.state = NodeState.DONE
        else:
            self._lost_nodes.on_channel_closed(node, returncode)

    def _on_node_reported(self, node: Node) -> None:
        """The node has sent all its records for the outcome. The run is over: stop the other nodes of this launcher."""
        self._show_attempts(self._attempts.remove_node(node.index))
        is_needed = node.index in self._participants.indices
        if self._config.one_launcher_leads and is_needed and not self._shutdown.in_progress:
            self._shutdown.stop_others()

    # The end of the run.

    def _finish(self) -> RunResult:
        if self._folder and (moved := run_folder.moved_to(self._folder)):  # By the user: the report belongs there.
            self._on_folder_moved(moved)
        error = self._shutdown.error or self._watches.failure(self._attempts.ended)
        lost, count = self._nodes.lost, self._shutdown.requests.count

        def asked_again() -> int:
            return self._shutdown.collect_signals(self._mailbox) - count

        result = outcome.result(
            run_id=self._run_id,
            attempts=self._attempts.ended,
            error=error,
            signals=self._shutdown.signals,
            signals_came_late=self._shutdown.came_late,
            continues=self._shutdown.continues,
            unkillable_pids=self._nodes.unkillable_pids,
            unreachable_hosts=tuple(node.host for node in lost if node.unkillable_pids is None),
            duration_s=time.monotonic() - self._started_at,
            run_dir=str(self._folder) if self._folder else None,
        )
        result = run_facts.completed(result, self._facts, self._nodes.all)
        result = self._watches.add_to_result(result)
        is_shown = self._messages.has_page(result, error)
        failure = outcome.with_leftovers(error, result) if lost else error
        more = self._watches.page_lines(result), self._watches.report_lines(result)
        self._messages.run_ended(result, error if is_shown else failure, *more, asked_again=asked_again)
        self._watches.on_run_ended(RunEnd(result, error, self._nodes.losses, lambda: asked_again() > 0))
        self._messages.close()
        if failure:
            failure.is_shown = is_shown
            raise failure
        return result
