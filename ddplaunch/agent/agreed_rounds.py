"""Rounds that several nodes agree on: each has an agent like this one, and they meet at the endpoint."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch import verdict
from ddplaunch.agent import endpoint
from ddplaunch.agent.events import FromMember, LauncherGone
from ddplaunch.agent.membership import Membership
from ddplaunch.errors import RENDEZVOUS, LaunchError
from ddplaunch.model import AttemptResult, NodesExpected
from ddplaunch.records import AttemptEnded, EndpointOpen, Meet, Notice, RendezvousGone
from ddplaunch.rounds import (
    Gathered,
    ListenForStore,
    MemberReady,
    NodeEnded,
    NodeJoined,
    NotReached,
    RendezvousLost,
    RoundFormed,
    RoundOver,
    RunClosed,
    RunFull,
    StopRound,
    StoreListens,
    WorkerFailed,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ddplaunch.agent.own_rounds import Means
    from ddplaunch.model import AgentSpec, Outcome, Round

_CLOSE_S = 2.0
_VERDICT_S = 30.0
_NEVER = float("inf")


class AgreedRounds:
    """Rounds of several nodes. A led agent is told where they meet; if that is lost, it goes on at the next place."""

    def __init__(self, spec: AgentSpec, local_world_size: int, means: Means) -> None:
        self._spec = spec
        self._next_meeting = spec.meeting
        self._size = local_world_size
        self._means = means
        self._member: Membership | None = None
        self._listener: socket.socket | None = None
        self._formed: Round | None = None
        self._next_attempt = 0
        self._stopped_attempt = -1
        self._over: RoundOver | None = None
        self._closed = False

    @property
    def must_stop(self) -> str:
        if self._lost:
            return self._lost
        current = self._formed is not None and self._formed.attempt == self._stopped_attempt
        return "another node stopped the round" if current else ""

    @property
    def _lost(self) -> str:
        member = self._member
        if self._spec.is_led and self._next_meeting and member:
            return "the rendezvous has moved"
        return f"the rendezvous at {member.where} is lost: {member.lost}" if member and member.lost else ""

    @property
    def worker_environ(self) -> dict[str, str]:
        member = self._member
        if not member or not (name := endpoint.interface_of(member.address)):
            return {}
        names = {"GLOO_SOCKET_IFNAME": name}
        if member.meeting.local_addr:
            names["NCCL_SOCKET_IFNAME"] = f"={name}"
        return names

    def next(self) -> tuple[Round, socket.socket | None] | None:
        while not self._means.must_end():
            deadline = time.monotonic() + self._join_timeout_s()
            member = self._member if self._member and not self._lost else self._enter(deadline)
            if member is None or member.index is None:
                continue
            self._formed = self._over = None
            member.say(NodeJoined(member.index, self._spec.host, self._size, member.reached, self._next_attempt))
            self._await(lambda: bool(self._formed or self._over), partial(member.patience, deadline))
            if self._over and not self._formed:
                self._not_needed(member, self._over)
                return None
            if self._formed and not self._means.must_end():
                listener, self._listener = self._listener, None
                self._next_attempt = self._formed.attempt + 1
                return self._formed, listener
        return None

    def _not_needed(self, member: Membership, over: RoundOver) -> None:
        """The run is over before this node has had a place in it; where it has waited for one, the verdict is its too.

        Raises:
            LaunchError: it came when all was over.
        """
        if not member.is_spare:
            raise LaunchError(f"{member.where}: {over.reason}", "", RENDEZVOUS)
        self._take_leave()
        outcome: Outcome = "stopped" if over.stopped else "failed" if over.failed else "succeeded"
        self._means.tell(Notice(f"the run is over; {self._spec.host} was not needed"))
        self._means.tell(
            AttemptEnded(AttemptResult(over.attempt, outcome, (), 0.0, note=over.reason, cause=over.cause))
        )

    def _join_timeout_s(self) -> float:
        meeting = self._next_meeting or (self._member.meeting if self._member else None)
        return meeting.join_timeout_s if meeting else _NEVER

    def _enter(self, deadline: float) -> Membership | None:
        """Go to the place that is due; a led agent waits until it is told one. None where it came to nothing."""
        if self._member:
            self._member.close()
            self._member = None
        self._means.wait(lambda: self._next_meeting is not None or self._means.must_end(), _NEVER)
        meeting, self._next_meeting = self._next_meeting, None
        if self._listener:
            self._listener.close()
            self._listener = None
        if meeting is None:
            return None
        self._closed, self._stopped_attempt = False, -1
        self._member = member = Membership(self._spec.host, meeting)
        if member.serves and self._spec.is_led:
            self._means.tell(EndpointOpen(meeting.token, member.addresses, member.port))
        member.enter(self._spec.max_restarts, self._means.start_member, self._means.post)
        deadline = min(deadline, time.monotonic() + meeting.join_timeout_s)
        self._await(lambda: member.index is not None, deadline)
        return member

    def over(self, result: AttemptResult) -> AttemptResult:
        if self._member and self._member.has_left:
            return replace(result, outcome="stopped", restarts=True)
        first = verdict.first_failure(result.exits)
        stopped, failed = self._means.must_end(), result.outcome == "failed"
        if self._member:
            index = self._member.index or 0
            self._member.say(NodeEnded(index, result.attempt, failed, stopped, first))
        over = self._await_verdict(result.outcome == "succeeded")
        if over is None:
            if self._spec.is_led and self._lost and not stopped:
                return replace(result, outcome="stopped", restarts=True, note=self._lost)
            outcome = "failed" if self._lost and not stopped else result.outcome
            return replace(result, outcome=outcome, note=self.must_stop or result.note)
        if not over.restarts:
            self._take_leave()
        told_to = result.outcome == "stopped" and (stopped or over.restarts)
        outcome = "stopped" if told_to or over.stopped else "failed" if over.failed else "succeeded"
        note = result.note or over.reason
        return replace(result, outcome=outcome, restarts=over.restarts, note=note, cause=over.cause)

    def _await_verdict(self, succeeded: bool) -> RoundOver | None:
        """What all nodes agree on. The others may run on for days after this node's workers have succeeded."""
        lost_after_s = self._member.meeting.lost_after_s if self._member else 0.0
        limit_s = self._spec.shutdown_timeout_s + lost_after_s + _VERDICT_S
        deadline = _NEVER if succeeded else time.monotonic() + limit_s
        ends_early = succeeded or self._spec.is_led
        self._means.wait(lambda: bool(self._over or self._lost or (ends_early and self._means.must_end())), deadline)
        if self._spec.is_led and self._means.must_end():  # The launcher, which stops all, knows why.
            self._means.wait(lambda: bool(self._over or self._lost), time.monotonic() + _CLOSE_S)
        return self._over

    def alarm(self) -> None:
        if self._formed and self._member and self._member.index is not None:
            self._member.say(WorkerFailed(self._member.index, self._formed.attempt))

    def apply(self, event: object) -> None:
        match event:
            case FromMember(token=token, record=record) if self._member and self._member.meeting.token == token:
                self._hear(self._member, record)
            case Meet(meeting=meeting):
                self._next_meeting = meeting
            case NodesExpected() if self._member:
                self._member.say(event)
            case LauncherGone() if self._member:  # Not told to stop, which would end the run for those that have one.
                self._member.leave()

    def _hear(self, member: Membership, record: object) -> None:
        match record:
            case MemberReady():
                member.ready(record)
            case Gathered():
                member.gathered = record
                if record.missing and (member.serves or not self._spec.is_led):  # All are led by one launcher.
                    self._means.tell(Notice(member.waiting(), 1 if self._spec.is_led else 0))
            case RunFull(hosts=hosts):
                member.is_spare = True
                self._means.tell(Notice(member.full(hosts)))
            case NotReached(reason=reason):
                self._means.tell(Notice(member.not_reached(reason), 1 if self._spec.is_led else 0))
            case ListenForStore(attempt=attempt, reached=reached):
                self._listener = self._listener or member.listen(reached)
                member.say(StoreListens(attempt, member.address, self._listener.getsockname()[1]))
            case RoundFormed(round=formed):
                self._formed, member.is_spare = formed, False
            case StopRound(attempt=attempt):
                self._stopped_attempt = attempt
            case RoundOver():
                self._over = record
            case RunClosed():
                self._closed = True
            case RendezvousLost(reason=reason, refused=refused):
                if not member.lost and self._spec.is_led:
                    self._means.tell(RendezvousGone(member.meeting.token, reason))
                member.lost = member.lost or reason
                if refused:
                    raise LaunchError(f"{member.where}: {reason}", "Give every run its own --rdzv-id.", RENDEZVOUS)

    def close(self) -> None:
        """Say good-bye where that was not done: the others need not wait for this node's heartbeat to rest."""
        member = self._member
        if member and member.index is not None and not self._lost and self._over is None:
            member.leave()
            self._means.wait(lambda: bool(self._lost), time.monotonic() + 0.2)

    def _take_leave(self) -> None:
        """The node that serves stays until all others have heard the verdict."""
        member = self._member
        if member and member.serves:
            self._means.wait(lambda: self._closed or bool(self._lost), time.monotonic() + _CLOSE_S)
        elif member:
            member.leave()

    def _await(self, done: Callable[[], bool], deadline: float | Callable[[], float]) -> None:
        """Until ``done`` or this node is told to stop; for a led agent also when the rendezvous is lost.

        Raises:
            LaunchError: the rendezvous is lost, or the time is over.
        """
        came = self._means.wait(lambda: done() or bool(self._lost) or self._means.must_end(), deadline)
        member = self._member
        if member is None or (self._spec.is_led and self._lost):
            return
        if self._lost or not came:
            raise LaunchError(*(member.cannot_meet() if self._lost else member.too_few()), RENDEZVOUS)
