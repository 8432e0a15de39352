"""Rounds that several nodes agree on: each has an agent like this one, and they meet at the endpoint."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddplaunch import protocol, verdict
from ddplaunch.agent import endpoint
from ddplaunch.agent.endpoint import listen
from ddplaunch.errors import RENDEZVOUS, LaunchError
from ddplaunch.records import Notice
from ddplaunch.rounds import (
    FROM_MEMBER,
    Gathered,
    ListenForStore,
    MemberReady,
    MemberSpec,
    NodeEnded,
    NodeGone,
    NodeJoined,
    RendezvousLost,
    RoundFormed,
    RoundOver,
    RunClosed,
    StopRound,
    StoreListens,
    WorkerFailed,
)

if TYPE_CHECKING:
    from typing import BinaryIO

    from ddplaunch.config import Meeting
    from ddplaunch.model import AgentSpec, AttemptResult, Round

_CLOSE_S = 5.0
_VERDICT_S = 30.0


@dataclass(frozen=True)
class Means:
    """What the agent lends to its rounds. ``wait`` as ``Agent._wait``; ``must_end``: this node was told to stop.

    ``start_member`` starts the member's process with four descriptors and the channel behind them.
    """

    wait: Callable[[Callable[[], bool], float | None], bool]
    must_end: Callable[[], bool]
    start_member: Callable[[list[int]], None]
    notice: Callable[[Notice], None]
    post: Callable[[object], None]


class AgreedRounds:
    """Several nodes, each with an agent like this one; they meet at the endpoint."""

    def __init__(self, spec: AgentSpec, meeting: Meeting, local_world_size: int, means: Means) -> None:
        self._spec = spec
        self._meeting = meeting
        self._size = local_world_size
        self._means = means
        self._where = f"{meeting.host}:{meeting.port}"
        self._channel: BinaryIO | None = None
        self._bind_address = ""
        self._address = ""
        self._serves = False
        self._index: int | None = None
        self._gathered: Gathered | None = None
        self._listener: socket.socket | None = None
        self._formed: Round | None = None
        self._stopped_attempt = -1
        self._over: RoundOver | None = None
        self._closed = False
        self._lost = ""

    @property
    def must_stop(self) -> str:
        if self._lost:
            return f"the rendezvous at {self._where} is lost: {self._lost}"
        current = self._formed is not None and self._formed.attempt == self._stopped_attempt
        return "another node stopped the round" if current else ""

    def next(self) -> tuple[Round, socket.socket | None] | None:
        deadline = time.monotonic() + self._meeting.join_timeout_s
        if self._channel is None:
            self._enter()
            self._await(lambda: self._index is not None, deadline)
        if self._means.must_end() or self._index is None:
            return None
        self._formed = self._over = self._gathered = None
        self._say(NodeJoined(self._index, self._spec.host, self._size))
        self._await(lambda: bool(self._formed or self._over), deadline)
        if self._means.must_end():
            return None
        if self._formed is None:
            raise LaunchError(f"{self._where}: {self._over.reason if self._over else ''}", "", RENDEZVOUS)
        listener, self._listener = self._listener, None
        return self._formed, listener

    def over(self, result: AttemptResult) -> AttemptResult:
        first = verdict.first_failure(result.exits)
        stopped, hopeless = self._means.must_end(), bool(verdict.why_hopeless(first))
        failed = result.outcome == "failed"
        self._say(NodeEnded(self._index or 0, result.attempt, failed, stopped, hopeless, first))
        over = self._await_verdict(result.outcome == "succeeded")
        if over is None:
            outcome = "failed" if self._lost else result.outcome
            return replace(result, outcome=outcome, note=self.must_stop or result.note)
        if not over.restarts:
            self._take_leave()
        told_to = result.outcome == "stopped" and (stopped or over.restarts)
        outcome = "stopped" if told_to else "failed" if over.failed else "succeeded"
        note = result.note or over.reason
        return replace(result, outcome=outcome, restarts=over.restarts, note=note, cause=over.cause)

    def _await_verdict(self, succeeded: bool) -> RoundOver | None:
        """What all nodes agree on. The others may run on for days after this node's workers have succeeded."""
        limit_s = self._spec.shutdown_timeout_s + self._meeting.lost_after_s + _VERDICT_S
        deadline = None if succeeded else time.monotonic() + limit_s
        self._means.wait(lambda: bool(self._over or self._lost or (succeeded and self._means.must_end())), deadline)
        return self._over

    def alarm(self) -> None:
        if self._formed and self._index is not None:
            self._say(WorkerFailed(self._index, self._formed.attempt))

    def apply(self, event: object) -> None:
        match event:
            case MemberReady(node_index=index):
                self._index = index
            case Gathered():
                self._gathered = event
                if event.missing:
                    self._means.notice(Notice(_waiting_text(self._where, event)))
            case ListenForStore(attempt=attempt):
                self._listener = listen(self._spec.host, self._bind_address, 0)
                self._say(StoreListens(attempt, self._address, self._listener.getsockname()[1]))
            case RoundFormed(round=formed):
                self._formed = formed
            case StopRound(attempt=attempt):
                self._stopped_attempt = attempt
            case RoundOver():
                self._over = event
            case RunClosed():
                self._closed = True
            case RendezvousLost(reason=reason, refused=refused):
                self._lost = self._lost or reason
                if refused:
                    raise LaunchError(f"{self._where}: {reason}", "Give every run its own --rdzv-id.", RENDEZVOUS)

    def close(self) -> None:
        """Say good-bye where that was not done: the others need not wait for this node's heartbeat to rest."""
        if self._channel and self._index is not None and not self._lost and self._over is None:
            self._say(NodeGone(self._index))
            self._means.wait(lambda: bool(self._lost), time.monotonic() + 0.2)

    def _take_leave(self) -> None:
        """The node that serves stays until all others have heard the verdict."""
        if self._serves:
            self._means.wait(lambda: self._closed or bool(self._lost), time.monotonic() + _CLOSE_S)
        elif self._index is not None:
            self._say(NodeGone(self._index))

    def _await(self, done: Callable[[], bool], deadline: float) -> None:
        """Until ``done`` or this node is told to stop.

        Raises:
            LaunchError: the rendezvous is lost, or the time is over.
        """
        came = self._means.wait(lambda: done() or bool(self._lost) or self._means.must_end(), deadline)
        if self._lost:
            raise LaunchError(
                f"{self._spec.host} cannot meet the other nodes at {self._where}: {self._lost}",
                f"This node's address on the way there is {self._address}. Is the node that serves it started, and its "
                "port open?",
                RENDEZVOUS,
            )
        if not came:
            hosts = ", ".join(self._gathered.hosts) if self._gathered else self._spec.host
            raise LaunchError(
                f"after {self._meeting.join_timeout_s:g} s only these nodes have come to {self._where}: {hosts}; "
                f"{self._meeting.min_nodes} are needed",
                "Start the others with the same --rdzv-endpoint and --rdzv-id.",
                RENDEZVOUS,
            )

    def _enter(self) -> None:
        """Start the member, with the endpoint's socket where this node owns it."""
        listener = endpoint.own(self._spec.host, self._meeting)
        self._serves = listener is not None
        self._bind_address = self._meeting.local_addr or (listener.getsockname()[0] if listener else "")
        self._address = self._meeting.local_addr or (
            self._meeting.host if listener else endpoint.route_address(self._spec.host, self._meeting)
        )
        self._bind_address = self._bind_address or self._address
        ours, theirs = socket.socketpair()
        null = os.open(os.devnull, os.O_RDWR)
        fds = [null, os.dup(null), os.dup(null), theirs.detach(), listener.detach() if listener else os.dup(null)]
        self._means.start_member(fds)
        self._channel = ours.makefile("wb")
        stream = ours.makefile("rb")
        threading.Thread(target=self._listen, args=(stream,), name="rendezvous", daemon=True).start()
        self._say(self._member_spec())

    def _member_spec(self) -> MemberSpec:
        meeting = self._meeting
        return MemberSpec(
            token=meeting.token,
            node_id=f"{self._spec.host} {secrets.token_hex(8)}",
            node_index=meeting.node_rank,
            address=meeting.host,
            port=meeting.port,
            serves=self._serves,
            min_nodes=meeting.min_nodes,
            max_nodes=meeting.max_nodes,
            max_restarts=self._spec.max_restarts,
            connect_timeout_s=meeting.join_timeout_s,
            last_call_s=meeting.last_call_s,
            lost_after_s=meeting.lost_after_s,
        )

    def _say(self, record: object) -> None:
        if self._channel:
            try:
                self._channel.write(protocol.encode(record))
                self._channel.flush()
            except OSError:
                self._lost = self._lost or "the rendezvous process of this node has ended"

    def _listen(self, stream: BinaryIO) -> None:
        try:
            while (received := protocol.read_record(stream, FROM_MEMBER)) is not None:
                self._means.post(received[0])
        except (OSError, protocol.ProtocolError):
            pass
        self._means.post(RendezvousLost("the rendezvous process of this node has ended"))


def _waiting_text(where: str, gathered: Gathered) -> str:
    count = f"{gathered.missing} more node{'s' if gathered.missing > 1 else ''}"
    return f"waiting at {where} for {count}; here: {', '.join(gathered.hosts)}"
