"""The agent of one node: starts, watches and stops its workers, and reports their exits to the launcher.

Runs in the agent's process. Only the main thread changes state and starts, signals and reaps processes; it waits only
in ``Mailbox.get``. Blocking calls run in daemon threads that post events. Must not decide anything for other nodes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from ddplaunch.agent import parts, this_node
from ddplaunch.agent.launcher_channel import LauncherLost, Outbox
from ddplaunch.agent.parts import NodeServices, StoppedEarly
from ddplaunch.agent.rendezvous import Rendezvous
from ddplaunch.agent.workers import start_plan
from ddplaunch.agent.workers.exit_details import (
    AttemptFailure,
    OomCounters,
    final_failure,
    killed_for_memory,
    outcome,
    shorten,
)
from ddplaunch.agent.workers.forkserver_client import HELPERS, MEMBER, STORE, Forked, ForkserverClient, ForkserverEvent
from ddplaunch.agent.workers.worker_group import WorkerGroup
from ddplaunch.errors import NODE_LOST, LaunchError
from ddplaunch.mailbox import NEVER, Mailbox
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.launcher_agent import (
    AgentReady,
    AgentSignalled,
    AttemptEnded,
    Notice,
    PassSignal,
    Ping,
    Pong,
    StopWorkers,
)
from ddplaunch.protocol.results import AttemptResult, Round
from ddplaunch.protocol.specs import AgentSpec, ProcessSpec, ProcessStarted, choose_start
from ddplaunch.system import limits, processes
from ddplaunch.system.files import script_file
from ddplaunch.system.signals import SignalReceived
from ddplaunch.system.unix_socket import LocalServer

if TYPE_CHECKING:
    import socket


_DRAIN_S, _START_S, _SLOW_IMPORT_S = 0.5, 30.0, 15.0


class Agent(NodeServices):
    """What a node does in one run, besides what its rendezvous and its parts do. Main thread only."""

    def __init__(self, spec: AgentSpec, outbox: Outbox, mailbox: Mailbox[object], warm: Forked | None = None) -> None:
        """Choose devices and how workers start; no process runs yet, except for the forkserver ``warm``.

        Raises:
            LaunchError: the workers cannot run on this node with these settings.
            StoppedEarly: the run was stopped while a feature waited for devices.
        """
        self.outbox, self._mailbox, self.post = outbox, mailbox, mailbox.post
        # First: a driver that does not answer delays both this and the placement, at the same time.
        self.begun = parts.begin(spec, mailbox.post)
        start_plan.check_program(spec.program, spec.host, os.environ.get("PATH", os.defpath))
        self.spec, self.rendezvous = spec, Rendezvous()
        self._parts: tuple[parts.Part, ...] = ()
        self._group: WorkerGroup | None = None
        # Why this node stops its workers; event handlers set these, conditions of ``wait`` read them.
        # _failure: the attempt has failed, besides by a worker's exit.
        # rendezvous.why_workers_must_stop: other nodes end it.
        # _stop_order: the run ends, for the launcher's order; or for _why_stopped_alone, which only this node knows.
        self._failure: AttemptFailure | None = None
        self._stop_order: StopWorkers | None = None
        self._why_stopped_alone: str | None = None
        self._kill_deadline = NEVER
        self.spec = self._agreed_spec = spec = parts.with_devices(spec, self)
        if self.is_stopping():
            raise StoppedEarly(self._why_stopped_alone or "")
        plan = choose_start(spec, os.environ, script_file.is_plain)
        self.placement = start_plan.place_workers(spec, os.environ)
        open_files = limits.raise_limit_for_workers(spec.host, self.placement.local_world_size)
        env = self.placement.shared_environ
        self.forkserver = ForkserverClient(spec, plan, env, open_files, self.post, outbox.send, self.fail, warm)
        self.stops_by, self.saved = lambda: self._kill_deadline, lambda: parts.saved(self._parts)
        self.rendezvous = self._choose_rendezvous()
        self.report = self.rendezvous.send_report if spec.each_node_has_launcher else outbox.send
        self._takes_part, self._last_start_at = True, 0.0
        self._helper_pids: dict[int, int] = {}
        self._unkillable_pids: tuple[int, ...] = ()
        self.worker_socket = LocalServer("worker socket", lambda found: parts.on_connection(self._parts, found))
        self._parts = parts.load(self)

    def _choose_rendezvous(self) -> Rendezvous:
        """A single node starts faster without the modules of several."""
        size = self.placement.local_world_size
        if not self.spec.has_peers:
            from ddplaunch.agent.rendezvous.single_node import SingleNodeRendezvous

            return SingleNodeRendezvous(self.spec, size, self.is_stopping, self.saved)
        from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous

        return MultiNodeRendezvous(self, size)

    def run(self) -> tuple[int, ...]:
        """Run attempts until the run ends. Returns the pids that SIGKILL has not ended.

        Raises:
            LaunchError: the run cannot continue.
        """
        self.outbox.send(AgentReady(self.placement.local_world_size))
        self.forkserver.ensure_forkserver()  # The forkserver imports torch while the nodes join.
        self.outbox.send(this_node.details(self.spec))
        if not all(part.may_take_part() for part in self._parts):
            self._takes_part = False
            self.wait(self.is_stopping)  # The launcher replaces this node, or ends the run.
            return self.close()
        while (opened := self.rendezvous.next_round()) is not None:
            self._agreed_spec = self.rendezvous.with_agreed(self._agreed_spec)
            ended = self._run_attempt(*opened)
            evidence = tuple(chain.from_iterable(part.evidence(ended.exits) for part in self._parts))
            result = self.rendezvous.finish_round(ended, has_unkillable=bool(self._unkillable_pids))
            self._kill_helper(STORE)
            self.outbox.drain(_DRAIN_S, lambda: self.wait(lambda: False, 0.0))
            self.outbox.send(AttemptEnded(result, evidence))
            if not result.attempt_follows:
                return self.close()
            for part in self._parts:
                part.before_next_attempt(result)
        if self._why_stopped_alone is not None:
            self.outbox.send(Notice(self._why_stopped_alone, -1))
        return self.close()

    def on_run_ended(self) -> None:
        """The last act, after ``run``. A node that takes no part keeps nothing for later runs."""
        for part in self._parts if self._takes_part else ():
            part.on_run_ended()

    def close(self, *, is_bug: bool = False) -> tuple[int, ...]:
        """Kill all that this agent has started; after a bug, stop the workers first. Returns the pids that survive."""
        if self._group and not self._group.all_ended and not self._unkillable_pids:
            (self._stop_workers if is_bug else self._kill_workers)(self._group)
        unkillable: list[int] = []
        with contextlib.ExitStack() as stack:  # An error of one keeps no other from its end.
            stack.callback(lambda: unkillable.extend(self.forkserver.close()))
            of_parts = (part.close for part in reversed(self._parts))
            for close in (self.rendezvous.close, self.worker_socket.close, *of_parts):
                stack.callback(close)
        return tuple(unkillable)

    # One attempt.

    def _run_attempt(self, round_: Round, listener: socket.socket | None) -> AttemptResult:
        started_at, oom_counters, self._failure = time.monotonic(), OomCounters.read(), None
        self._group = group = WorkerGroup(self._agreed_spec, round_, self.outbox)
        for part in self._parts:
            part.on_attempt(group, round_)
        with listener or contextlib.nullcontext():
            self._start_workers(group, round_, listener)
        for part in self._parts:
            part.on_started()
        self.wait(lambda: group.all_ended or group.any_failed or self._must_stop())
        if self._others_must_stop(group):
            self.rendezvous.report_stop()
        for part in self._parts:
            part.before_stop(self._failure)
        self._stop_workers(group)
        self._sweep(group)
        out_of_memory = killed_for_memory(oom_counters, OomCounters.read())
        exits = group.finish(time.monotonic() + _DRAIN_S, out_of_memory, self.is_stopping())
        for part in self._parts:
            exits = part.on_attempt_ended(exits)
        exits = shorten(exits, round_.nnodes)
        failure = final_failure(self._failure, self._unkillable_pids, self.spec.host, out_of_memory)
        return AttemptResult(
            attempt=round_.attempt,
            outcome=outcome(failure, exits, was_stopped=self._must_stop()),
            exits=exits,
            duration_s=time.monotonic() - started_at,
            reason=failure.reason if failure else self._why_stopped_alone or "",
            hung=self._failure is not None and self._failure.hung,
            restart_count=round_.restart_count,
            world_size=round_.world_size,
        )

    def fail(self, failure: AttemptFailure) -> None:
        """The attempt fails. What follows the first failure may be its consequence."""
        self._failure = self._failure or failure

    def is_stopping(self) -> bool:
        return self._stop_order is not None

    def _must_stop(self) -> bool:
        return bool(self._stop_order or self._failure or self.rendezvous.why_workers_must_stop is not None)

    def _others_must_stop(self, group: WorkerGroup) -> bool:
        """Whether this node has failed, or was stopped alone: not by a launcher that leads all nodes, and stops all."""
        was_stopped_alone = self._why_stopped_alone is not None or not self.spec.one_launcher_leads
        return bool(group.any_failed or self._failure or (self._stop_order and was_stopped_alone))

    # Starting.

    def _start_workers(self, group: WorkerGroup, round_: Round, listener: socket.socket | None) -> None:
        """Start the store and all workers. Returns once all workers run, or once the attempt must end."""
        self._await_forkserver()
        environ = dict(self.rendezvous.default_environ)
        for part in self._parts:
            environ.update(part.default_environ())
        if self._must_stop():
            return
        agreed = parts.with_script_args(self._parts, self._agreed_spec)
        if listener is not None and round_.has_store:
            self.forkserver.start_store(round_.attempt, listener, group.attempt_dir)
        for worker in group.workers:
            plan = self.forkserver.plan
            asked = self._parts if plan.bootstrap else ()
            texts = {name: text for part in asked for name, text in part.for_worker(worker).items()}
            spec = start_plan.worker_spec(agreed, plan, self.placement, round_, worker, environ, texts)
            self.forkserver.start(spec, group.open_streams(worker), worker.local_rank)
        self._last_start_at = time.monotonic()
        all_started = lambda: not self.forkserver.is_starting or self._must_stop() or group.any_failed  # noqa: E731
        if not self.wait(all_started, lambda: self._last_start_at + _START_S):
            text = f"the forkserver on {self.spec.host} has started no worker for {_START_S:.0f} s"
            self.fail(AttemptFailure(text))
        elif not self.forkserver.is_starting and not self._failure:
            group.report_started(self.forkserver.import_s)

    def _await_forkserver(self) -> None:
        self.forkserver.ensure_forkserver()
        is_ready = lambda: self.forkserver.is_ready or self._must_stop()  # noqa: E731
        if not self.wait(is_ready, time.monotonic() + _SLOW_IMPORT_S):
            self.outbox.send(Notice(f"importing torch on {self.spec.host} takes long: busy CPUs, or a slow disk"))
            self.wait(is_ready)

    def start_member(self, fds: list[int]) -> None:
        """Start this node's member of the rendezvous, after killing an earlier one; again if its forkserver dies.

        Raises:
            LaunchError: that one has died, too, or no process can be started.
        """
        self._kill_helper(MEMBER)
        with contextlib.ExitStack() as stack:
            for fd in fds:
                stack.callback(os.close, fd)
            if (failure := self._try_member(fds)) and not self.is_stopping():
                self.outbox.send(Notice(f"{failure.reason}; trying again"))
                failure = self._try_member(fds)
        if failure and not self.is_stopping():
            hint = first_failure.KILLED_HINT if failure.returncode == -signal.SIGKILL else ""
            raise LaunchError(failure.reason, hint, NODE_LOST)

    def _try_member(self, fds: list[int]) -> AttemptFailure | None:
        self._failure = None  # The next attempt has not begun.
        self._await_forkserver()
        self.forkserver.start(ProcessSpec(tag="member", how="member"), [os.dup(fd) for fd in fds], MEMBER)
        # Until the member's pid is known, a sweep would kill the member.
        self.wait(lambda: not self.forkserver.is_starting or self.is_stopping())
        return self._failure

    # Stopping.

    def _stop_workers(self, group: WorkerGroup) -> None:
        """SIGTERM, then SIGKILL after the grace period.

        On return all workers are reaped, except any in uninterruptible sleep.
        """
        if not self.wait(lambda: not self.forkserver.is_starting, time.monotonic() + processes.UNKILLABLE_AFTER_S):
            self.forkserver.close_forkserver()  # The forkserver hangs; the sweep kills workers that it has started.
        if not group.all_ended:
            if not self._stop_order:  # It has a grace period of its own.
                self._kill_deadline = min(self._kill_deadline, time.monotonic() + self.spec.timeouts.shutdown_timeout_s)
            group.stop(self._stop_order.signum if self._stop_order else signal.SIGTERM)
            self.wait(lambda: group.all_ended, lambda: self._kill_deadline)
        if not group.all_ended:
            self._kill_workers(group)
        if group.any_failed or self._must_stop():  # Else workers of other nodes may still use it.
            self._kill_helper(STORE)
        if not self._stop_order:
            self._kill_deadline = NEVER

    def _kill_workers(self, group: WorkerGroup) -> None:
        group.kill()
        self.wait(lambda: group.all_ended, time.monotonic() + processes.UNKILLABLE_AFTER_S)

    def _kill_helper(self, helper: int) -> None:
        if helper in self._helper_pids:
            processes.signal_process(self._helper_pids[helper], signal.SIGKILL)
            self.wait(lambda: helper not in self._helper_pids, time.monotonic() + processes.UNKILLABLE_AFTER_S)

    def _sweep(self, group: WorkerGroup) -> None:
        """Kill all remaining children and descendants of the workers."""
        # Excluded: the sweep would reap them, and their exits would be lost.
        unkillable = tuple(group.pids_by_local_rank().values())
        of_parts = chain.from_iterable(part.pids for part in self._parts)
        excluded = frozenset((*unkillable, *self._helper_pids.values(), *of_parts))
        self._unkillable_pids = (*unkillable, *self.forkserver.sweep(excluded))

    # Events.

    def wait(self, done: Callable[[], bool], deadline: float | Callable[[], float] = NEVER) -> bool:
        """Handle events until ``done()``; False if ``deadline`` comes first.

        ``deadline`` is a time of ``time.monotonic()``, or a function that returns it if it may change.
        """
        while True:
            due = parts.run_due(self._parts, time.monotonic())
            if done():
                return True
            limit = deadline() if callable(deadline) else deadline
            event = self._mailbox.get(min(limit, due))
            if event is not None:
                self._handle_event(event)
            elif time.monotonic() >= limit:
                return False

    def _handle_event(self, event: object) -> None:
        match event:
            case ProcessStarted():
                self._on_started(event)
            case _ if isinstance(event, ForkserverEvent):
                self.forkserver.handle_event(event)
            case StopWorkers():
                self.stop(event)
            case LauncherLost():
                self._on_launcher_lost()
            case SignalReceived(signum=signum):
                self._on_signal(signum)
            case Ping(time_s=time_s):
                self.outbox.send(Pong(time_s, time.time()))
            case PassSignal(signum=signum) if self._group:
                self._group.signal(signum)
            case _ if callable(event):  # See ``NodeServices.post``.
                event()
            case _ if not parts.on_event(self._parts, event):
                self.rendezvous.handle_event(event)

    def _on_started(self, event: ProcessStarted) -> None:
        self._last_start_at = time.monotonic()
        local_rank = self.forkserver.on_started(event)
        if local_rank is None:  # The forkserver was closed meanwhile; the sweep kills the process.
            return
        if not event.pid:
            text = f"{self.spec.host} cannot start another process: {event.error} ({limits.PROCESS_LIMITS_HINT})"
            self.fail(AttemptFailure(text))
        elif local_rank in HELPERS:
            self._helper_pids[local_rank] = event.pid
            on_exited = functools.partial(self._on_helper_exited, local_rank)
            processes.watch_exit(event.pid, event.tag, lambda: self._mailbox.post(on_exited))
        elif group := self._group:
            on_exited = functools.partial(self._on_worker_exited, group, local_rank)
            group.on_started(local_rank, event.pid, lambda: self._mailbox.post(on_exited))

    def _on_worker_exited(self, group: WorkerGroup, local_rank: int) -> None:
        for part in self._parts:
            part.on_worker_exited(group.workers[local_rank])
        group.on_exited(local_rank)

    def _on_helper_exited(self, helper: int) -> None:
        returncode = processes.reap(self._helper_pids.pop(helper))
        if helper == STORE and self._needs_store():  # The channel reports a member's end.
            self.fail(self.forkserver.store_failure(returncode))

    def _needs_store(self) -> bool:
        if (group := self._group) is None or group.any_failed or self._must_stop():
            return False
        return self.forkserver.is_starting or not group.all_ended

    def _on_launcher_lost(self) -> None:
        self._why_stopped_alone = f"the agent on {self.spec.host} lost contact with the launcher"
        self.rendezvous.on_launcher_lost()
        self.stop(StopWorkers(signal.SIGTERM, self.spec.timeouts.shutdown_timeout_s))

    def _on_signal(self, signum: int) -> None:
        self.outbox.send(AgentSignalled(signum))
        if signum in (signal.SIGUSR1, signal.SIGUSR2):  # The launcher sends them to all workers.
            return
        name = first_failure.describe(-signum)
        self._why_stopped_alone = f"another process sent {name} to the agent on {self.spec.host}"
        self.stop(StopWorkers(signum, self.spec.timeouts.shutdown_timeout_s))

    def stop(self, order: StopWorkers) -> None:
        earlier, self._stop_order = self._stop_order, order
        self._kill_deadline = min(self._kill_deadline, time.monotonic() + order.grace_s)
        # SLURM signals both agent and launcher: only an order with less time is the user's second signal.
        is_urgent = earlier is not None and order.grace_s < earlier.grace_s
        is_examined_first = not is_urgent and any(part.delays_stop for part in self._parts)
        if self._group:
            self._group.on_stop_ordered()
        if self._group and not self.forkserver.is_starting and not is_examined_first:
            if earlier and is_urgent:  # Its signal may have been held back for the examination.
                self._group.stop(earlier.signum)
            self._group.stop(order.signum)
