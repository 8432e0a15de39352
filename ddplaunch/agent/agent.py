"""One node's supervisor: starts its workers, watches them, stops them, and tells the launcher how they ended.

The main thread owns all state and alone spawns, signals and reaps; its only wait is ``mailbox.get``. Every blocking
thing has a daemon thread that posts an event.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from ddplaunch import verdict
from ddplaunch.agent import limits, processes, program
from ddplaunch.agent.events import Exited, ForkserverGone, LauncherGone, Signalled, WorkersHeard
from ddplaunch.agent.oom import OomCounters, blames
from ddplaunch.agent.own_rounds import Means, rounds_for
from ddplaunch.agent.placement import place, worker_spec
from ddplaunch.agent.spawner import MEMBER, STORE, Spawner, store_request
from ddplaunch.agent.worker_group import WorkerGroup
from ddplaunch.hang import EndHung
from ddplaunch.harm import Inflict
from ddplaunch.model import AgentSpec, AttemptResult, Outcome, Round, WorkerExit
from ddplaunch.records import (
    AgentReady,
    AgentSignalled,
    AttemptEnded,
    ForkserverReady,
    ImportFailed,
    Notice,
    PassSignal,
    Ping,
    Pong,
    StopWorkers,
    WorkerSpec,
    WorkerStarted,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ddplaunch.agent.outbox import Outbox
    from ddplaunch.mailbox import Mailbox

DRAIN_S, _START_S, _SLOW_IMPORT_S, _NEVER = 0.5, 30.0, 15.0, float("inf")


class Agent:
    """A node's part in one run. Main thread only."""

    def __init__(self, spec: AgentSpec, outbox: Outbox, mailbox: Mailbox[object]) -> None:
        self._spec = spec
        self._outbox, self._mailbox = outbox, mailbox
        plan, self._placement = program.plan(spec, os.environ), place(spec, os.environ)
        size = self._placement.local_world_size
        self._spawner = Spawner(spec, plan, self._placement.shared_environ, limits.make_room(spec, size), mailbox.post)
        self._group: WorkerGroup | None = None
        self._last_start_s, self._stop_deadline, self._trouble, self._told_by = 0.0, _NEVER, "", ""
        self._helpers: dict[int, int] = {}
        self._stop: StopWorkers | None = None
        self._unkillable: tuple[int, ...] = ()
        means = Means(self._wait, lambda: bool(self._stop), self._start_member, outbox.send, mailbox.post)
        self._rounds = rounds_for(spec, size, means, lambda: bool(self._stop or self._unkillable))

    def run(self) -> tuple[int, ...]:
        """Attempt after attempt until one ends the run. Returns the pids that could not be ended.

        Raises:
            LaunchError: the run cannot go on.
        """
        self._outbox.send(AgentReady(os.getpid(), self._placement.local_world_size))
        self._spawner.prepare(self._outbox.send)  # Now, so that torch is imported while nodes find each other.
        restarts = True
        while restarts and (opened := self._rounds.next()) is not None:
            result = self._rounds.over(self._attempt(*opened))
            self._outbox.drain(DRAIN_S, lambda: self._wait(lambda: False, 0.0))
            self._outbox.send(AttemptEnded(result))
            restarts = result.restarts
        if restarts and self._told_by:
            self._outbox.send(Notice(self._told_by, -1))
        return self.close()

    def close(self) -> tuple[int, ...]:
        """End everything this agent has started, at once. Returns the pids that could not be ended."""
        if self._group and not self._group.all_ended and not self._unkillable:
            self._group.kill()
            self._wait(lambda: self._group is None or self._group.all_ended, time.monotonic() + processes.SWEEP_S)
        self._rounds.close()
        return self._spawner.end()

    # One attempt.

    def _attempt(self, round_: Round, listener: socket.socket | None) -> AttemptResult:
        started_s, self._trouble = time.monotonic(), ""
        counters = OomCounters.read()
        self._group = group = WorkerGroup(self._spec, round_, self._outbox, self._mailbox.post)
        with listener or contextlib.nullcontext():
            self._start(group, round_, listener)
        group.silence.watch(self._wait, lambda: group.all_ended or group.any_failed or self._must_end())
        if group.any_failed or self._trouble or self._told_by or (self._stop and not self._spec.is_led):
            self._rounds.alarm()
        self._end_workers(group)
        hanging = group.unkillable()  # Not for the sweep to reap: how a worker ends must not get lost.
        self._unkillable = (*hanging, *self._spawner.sweep(frozenset((*hanging, *self._helpers.values()))))
        out_of_memory = blames(counters, OomCounters.read())
        exits = group.finish(time.monotonic() + DRAIN_S, out_of_memory, bool(self._stop))
        if out_of_memory != "no" and self._trouble.endswith("SIGKILL"):
            self._trouble += f", {verdict.KILLED_FOR_MEMORY[out_of_memory]}"
        if self._unkillable:
            self._trouble = f"pids {', '.join(map(str, self._unkillable))} on {self._spec.host} cannot be ended"
        note = self._trouble or self._told_by
        hung, duration_s = group.silence.is_hung, time.monotonic() - started_s
        return AttemptResult(round_.attempt, self._outcome(exits), exits, duration_s, note=note, hung=hung)

    def _outcome(self, exits: tuple[WorkerExit, ...]) -> Outcome:
        if self._trouble or verdict.first_failure(exits):
            return "failed"
        return "stopped" if self._stop or self._rounds.must_stop else "succeeded"

    def _must_end(self) -> bool:
        return bool(self._stop or self._trouble or self._rounds.must_stop)

    def _start(self, group: WorkerGroup, round_: Round, listener: socket.socket | None) -> None:
        """Ask for the store and all workers; returns when all run, or when the attempt must end already."""
        self._ensure_forkserver()
        if self._must_end():
            return
        if listener is not None:
            self._spawner.request(*store_request(round_, listener), STORE)
        extra = self._rounds.worker_environ
        for worker in group.workers:
            spec = worker_spec(self._spec, self._spawner.plan, self._placement, round_, worker, extra)
            self._spawner.request(spec, group.open_streams(worker), worker.local_rank)
        self._last_start_s = time.monotonic()
        done = lambda: not self._spawner.is_waiting or self._must_end() or group.any_failed  # noqa: E731
        if not self._wait(done, lambda: self._last_start_s + _START_S):
            self._trouble = f"the forkserver on {self._spec.host} has started no worker for {_START_S:.0f} s"
        elif not self._spawner.is_waiting and not self._trouble:
            group.tell_started()

    def _ensure_forkserver(self) -> None:
        self._spawner.prepare(self._outbox.send)
        done = lambda: self._spawner.is_ready or self._must_end()  # noqa: E731
        if not self._wait(done, time.monotonic() + _SLOW_IMPORT_S):
            self._outbox.send(Notice(f"importing torch on {self._spec.host} takes long (a cold file system?)"))
            self._wait(done)

    def _start_member(self, fds: list[int]) -> None:
        """Have the forkserver start this node's member of the rendezvous."""
        self._end_helper(MEMBER)
        self._ensure_forkserver()
        self._spawner.request(WorkerSpec(tag="member", how="member"), fds, MEMBER)
        self._wait(lambda: not self._spawner.is_waiting or bool(self._stop))  # A sweep kills one that is not known.

    def _end_workers(self, group: WorkerGroup) -> None:
        """Polite, then not: when it returns all workers are reaped, but those in uninterruptible sleep."""
        if not self._wait(lambda: not self._spawner.is_waiting, time.monotonic() + processes.SWEEP_S):
            self._spawner.close()  # It hangs; what it may have started is found by the sweep.
        if not group.all_ended:
            self._stop_deadline = min(self._stop_deadline, time.monotonic() + self._spec.shutdown_timeout_s)
            group.stop(self._stop.signum if self._stop else signal.SIGTERM)
            self._wait(lambda: group.all_ended, lambda: self._stop_deadline)
        if not group.all_ended:
            group.kill()
            self._wait(lambda: group.all_ended, time.monotonic() + processes.SWEEP_S)
        self._end_helper(STORE)
        if not self._stop:
            self._stop_deadline = _NEVER

    def _end_helper(self, place: int) -> None:
        if place in self._helpers:
            processes.signal_process(self._helpers[place], signal.SIGKILL)
            self._wait(lambda: place not in self._helpers, time.monotonic() + processes.SWEEP_S)

    # Events.

    def _wait(self, done: Callable[[], bool], deadline: float | Callable[[], float] = _NEVER) -> bool:
        """Take events until ``done()``; False if ``deadline`` (``time.monotonic()``, may move) came first."""
        while not done():
            event = self._mailbox.get(deadline() if callable(deadline) else deadline)
            if event is None:
                return False
            self._apply(event)
        return True

    def _apply(self, event: object) -> None:
        match event:
            case WorkerStarted():
                self._started(event)
            case Exited(local_rank=local_rank):
                self._exited(local_rank)
            case ForkserverReady() | ImportFailed() | ForkserverGone():
                trouble, notice = self._spawner.heard(event)
                self._trouble = self._trouble or trouble
                if notice:
                    self._outbox.send(Notice(notice, 1))
            case StopWorkers():
                self._stop_asked(event)
            case LauncherGone():
                self._told_by = f"the agent on {self._spec.host} has not heard of its launcher for too long"
                self._rounds.apply(event)
                self._stop_asked(StopWorkers(signal.SIGTERM, self._spec.shutdown_timeout_s))
            case Signalled(signum=signum):
                self._outbox.send(AgentSignalled(signum))  # What it means is for the launcher to say, but an end.
                if signum not in (signal.SIGUSR1, signal.SIGUSR2):
                    self._told_by = f"somebody sent {verdict.describe(-signum)} to the agent on {self._spec.host}"
                    self._stop_asked(StopWorkers(signum, self._spec.shutdown_timeout_s))
            case Ping():
                self._outbox.send(Pong())
            case WorkersHeard() | EndHung() if self._group:
                self._trouble = self._group.silence.hear(event) or self._trouble
            case PassSignal(signum=signum) if self._group:
                self._group.signal(signum)
            case Inflict() if self._group:
                self._group.inflict(event)
            case _:
                self._rounds.apply(event)

    def _started(self, event: WorkerStarted) -> None:
        self._last_start_s = time.monotonic()
        local_rank = self._spawner.taken(event)
        if local_rank is None:  # Given up before; the sweep has it.
            return
        exited = lambda: self._mailbox.post(Exited(local_rank))  # noqa: E731
        if not event.pid:
            self._trouble = f"{self._spec.host} cannot start another process: {event.error} ({limits.WHERE_TO_LOOK})"
        elif local_rank < 0:
            self._helpers[local_rank] = event.pid
            processes.watch_exit(event.pid, event.tag, exited)
        elif self._group:
            self._group.started(local_rank, event.pid, exited)

    def _exited(self, local_rank: int) -> None:
        if local_rank >= 0 and self._group:
            self._group.exited(local_rank)
        elif local_rank < 0:
            ended = verdict.describe(processes.reap(self._helpers.pop(local_rank)))
            runs = (group := self._group) and (self._spawner.is_waiting or not group.all_ended) and not group.any_failed
            if local_rank == STORE and runs and not self._must_end():  # What the member's end means, its channel tells.
                self._trouble = f"the workers' store on {self._spec.host} ended by {ended}"

    def _stop_asked(self, order: StopWorkers) -> None:
        self._stop = order
        self._stop_deadline = min(self._stop_deadline, time.monotonic() + order.grace_s)
        if self._group and not self._spawner.is_waiting:
            self._group.stop(order.signum)
