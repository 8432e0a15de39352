"""Rendezvous of several nodes: joins, waits for rounds, reports failures, and waits for the verdict of all nodes.

Runs in the agent, main thread only. The node's member of the rendezvous is another process, to which a
``RendezvousClient`` sends. A launcher that assigns the rendezvous replaces a lost rendezvous by another.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent import this_node
from ddplaunch.agent.events import LauncherLost
from ddplaunch.agent.rendezvous.client import RendezvousClient
from ddplaunch.agent.rendezvous.single_node import Rendezvous
from ddplaunch.errors import HARDWARE, RENDEZVOUS, LaunchError
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import (
    AssignNodes,
    AttemptEnded,
    EndpointOpen,
    FirstRoundFormed,
    JoinRendezvous,
    NeedsRendezvous,
    NodeDeparts,
    NodeSilent,
    Notice,
    OrderToNodes,
    ReportOfNode,
    RunIdAgreed,
)
from ddplaunch.protocol.rendezvous import (
    AllNodesLeft,
    ListenForWorkersStore,
    MemberReady,
    NodeJoined,
    NodeRefused,
    NodeStops,
    NoFreePlace,
    RecordsRejected,
    RendezvousLost,
    RendezvousNotFound,
    ReportToServer,
    RoundFormed,
    StopRound,
    WaitingNodes,
    WorkersStoreListens,
)
from ddplaunch.protocol.results import RoundVerdict
from ddplaunch.rounds import verdict as verdicts
from ddplaunch.text import quote

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ddplaunch.agent.rendezvous.single_node import AgentCallbacks
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult, Round
    from ddplaunch.protocol.specs import AgentSpec

_CLOSE_S = 2.0
_SERVER_LEAVES_S = 0.2
_VERDICT_S = 30.0
_TELL_S = 30.0
"""For so long the node that serves the rendezvous waits for nodes which do not know yet that the job does not start."""

_REFUSED_HINT = "Start the job without that node; --health warn, on it, uses it all the same."


class MultiNodeRendezvous(Rendezvous):
    """One node's part in a rendezvous of several nodes."""

    def __init__(self, spec: AgentSpec, local_world_size: int, callbacks: AgentCallbacks) -> None:
        self._spec = spec
        self._launcher_assigns_rendezvous = spec.launcher_assigns_rendezvous
        self._local_world_size = local_world_size
        self._callbacks = callbacks
        self._next_config = spec.rendezvous
        self._client: RendezvousClient | None = None
        self._listener: socket.socket | None = None
        self._formed: RoundFormed | None = None
        self._next_attempt = self._restarts_so_far = 0
        self._is_complete = self._all_left = False
        self._departs, self._stopped_attempt, self._joined_time_s = "", -1, 0.0
        self._verdict: RoundVerdict | None = None

    @property
    def stop_reason(self) -> str | None:
        if self._over_reason is not None:
            return self._over_reason
        is_stopped = self._formed is not None and self._formed.round.attempt == self._stopped_attempt
        return "another node stopped the workers" if is_stopped else None

    @property
    def _over_reason(self) -> str | None:
        """Why this node's rendezvous is over for it: it is lost, or the launcher has assigned another; None if not."""
        client = self._client
        if self._launcher_assigns_rendezvous and self._next_config and client:
            return "the rendezvous has moved"
        if client is None or client.lost_reason is None:
            return None
        return f"the rendezvous at {client.endpoint} is lost: {client.lost_reason}"

    @property
    def _is_over(self) -> bool:
        return self._over_reason is not None

    @property
    def _endpoint(self) -> str:
        """Where the node that serves the rendezvous is, for the user."""
        return self._client.endpoint if self._client else "the node that serves the rendezvous"

    @property
    def worker_environ(self) -> dict[str, str]:
        return self._client.worker_environ if self._client else {}

    # Before a round.

    def next_round(self) -> tuple[Round, socket.socket | None] | None:
        while not self._callbacks.is_stopping():
            if (client := self._client) and not self._is_over:
                client.start_clock()
            else:
                client = self._connect()
            if client is None or client.index is None:
                continue
            self._formed = self._verdict = None
            self._join(client)
            self._wait_for(lambda: bool(self._formed or self._verdict), client.join_deadline)
            if self._verdict and not self._formed:
                self._finish_as_spare(client, self._verdict)
                return None
            if self._formed and not self._callbacks.is_stopping():
                listener, self._listener = self._listener, None
                self._next_attempt = self._formed.round.attempt + 1
                return self._formed.round, listener
        return None

    def complete(self, spec: AgentSpec) -> AgentSpec:
        client, formed = self._client, self._formed
        if self._launcher_assigns_rendezvous or self._is_complete or not (client and client.ready and formed):
            return spec
        self._is_complete, ready = True, client.ready
        place = f"{spec.host}.{formed.round.node_rank}"
        names = (place,) if formed.shares_host else (spec.host, place)
        spec, moved_to = this_node.moved_into_run(spec, ready, names, self._callbacks.send)
        self._callbacks.send(FirstRoundFormed(moved_to))
        if formed.max_restarts != spec.max_restarts:
            self._callbacks.send(Notice(client.other_limit_message(formed.max_restarts)))
        return replace(spec, run_id=ready.run_id, max_restarts=formed.max_restarts)

    def _join(self, client: RendezvousClient) -> None:
        host, size = self._spec.host, self._local_world_size
        self._joined_time_s = time.time()
        index, address = client.index or 0, client.server_address
        client.send(NodeJoined(index, host, size, address, self._next_attempt, self._departs, self._restarts_so_far))

    def _finish_as_spare(self, client: RendezvousClient, verdict: RoundVerdict) -> None:
        """Report the end of a run in which this spare has never taken part.

        Raises:
            LaunchError: this node is not a spare: the run had ended before this node joined, or does not start.
        """
        if verdict.node_leaves:
            self._await_others(client)
            raise LaunchError(verdict.reason, _REFUSED_HINT, HARDWARE)
        if not client.is_spare:
            raise LaunchError(f"{client.endpoint}: {quote(verdict.reason, 1000)}", "", RENDEZVOUS)
        self._leave()
        self._callbacks.send(Notice(f"the run has ended; {self._spec.host} was not needed"))
        self._callbacks.send(AttemptEnded(verdicts.of_spare(verdict)))

    def refuse(self, reason: str) -> None:
        """As ``Rendezvous.refuse``. Without it the others would wait for this node until the end of their patience."""
        config = self._next_config
        if config is None or self._launcher_assigns_rendezvous:
            return
        is_fixed = config.min_nodes == config.max_nodes
        with contextlib.suppress(LaunchError):  # Then there is nobody to tell.
            client = self._connect(_TELL_S, is_wanted=lambda client: client.is_server or is_fixed)
            if client and client.index is not None:
                client.send(NodeRefused(client.index, reason))
                self._await_others(client)

    def _await_others(self, client: RendezvousClient) -> None:
        """On the node that serves the rendezvous: stay until the others have heard that the job does not start."""
        if client.is_server:
            self._send_notice(f"telling the other nodes that the job does not start, for up to {_TELL_S:.0f} s")
            is_over = lambda: self._all_left or self._is_over or self._callbacks.is_stopping()  # noqa: E731
            self._callbacks.wait(is_over, time.monotonic() + _TELL_S)

    def _connect(
        self, limit_s: float = NEVER, is_wanted: Callable[[RendezvousClient], bool] = lambda _: True
    ) -> RendezvousClient | None:
        """Connect to the next rendezvous, once it is known. None if this node must stop before, or if not wanted.

        ``limit_s`` and the limit of the rendezvous count from the moment at which torch is imported.
        """
        if self._client:
            self._client.close()
            self._client = None
        self._callbacks.wait(lambda: self._next_config is not None or self._callbacks.is_stopping(), NEVER)
        config, self._next_config = self._next_config, None
        if self._listener:
            self._listener.close()
            self._listener = None
        if config is None:
            return None
        self._all_left, self._stopped_attempt = False, -1
        self._client = client = RendezvousClient(self._spec, config)
        if not is_wanted(client):
            return None
        if client.is_server and self._launcher_assigns_rendezvous:
            self._callbacks.send(EndpointOpen(config.token, client.addresses, client.port))
        client.connect(self._callbacks, partial(self._handle_record, client))
        self._wait_for(lambda: client.index is not None, min(client.join_deadline(), time.monotonic() + limit_s))
        return client

    def _wait_for(self, done: Callable[[], bool], deadline: float | Callable[[], float]) -> None:
        """Wait until ``done``, the rendezvous is lost, or this node must stop.

        Raises:
            LaunchError: the deadline has passed, or the rendezvous is lost and the launcher assigns no other.
        """
        is_in_time = self._callbacks.wait(lambda: done() or self._is_over or self._callbacks.is_stopping(), deadline)
        client = self._client
        if client is None or (self._launcher_assigns_rendezvous and self._is_over):
            return
        if self._is_over:
            raise client.unreachable_error()
        if not is_in_time:
            raise client.too_few_error()

    # After a round.

    def finish_round(self, result: AttemptResult, *, has_unkillable: bool) -> AttemptResult:
        # The launcher is lost, and the other nodes go on. The agent calls ``next_round``, which returns None.
        if self._client and self._client.has_left:
            return verdicts.of_node_that_left(result)
        is_stopping = self._callbacks.is_stopping()
        if self._client:
            index = self._client.index or 0
            self._client.send(verdicts.report(result, index, is_stopping=is_stopping, has_unkillable=has_unkillable))
        verdict = self._await_verdict(result.outcome == "succeeded")
        if verdict is None:
            if not is_stopping and self._over_reason:
                goes_on = self._launcher_assigns_rendezvous
                return verdicts.of_lost_rendezvous(result, self._over_reason, goes_on=goes_on)
            if self._callbacks.is_stopping():
                return verdicts.of_stopped_node(result, self.stop_reason)
            return verdicts.of_missing_verdict(result, self.stop_reason, self._endpoint)
        if not verdict.attempt_follows:
            self._leave()
        self._restarts_so_far = result.restart_count + verdict.restart_follows
        return verdicts.with_verdict(result, verdict, is_stopping=is_stopping)

    def _await_verdict(self, succeeded: bool) -> RoundVerdict | None:
        """The verdict; None if none comes in time. No deadline after a success: other nodes may run for days."""
        silent_after_s = self._client.config.silent_after_s if self._client else 0.0
        limit_s = self._spec.timeouts.shutdown_timeout_s + silent_after_s + _VERDICT_S
        deadline = NEVER if succeeded else time.monotonic() + limit_s
        may_stop_early = succeeded or self._launcher_assigns_rendezvous
        self._callbacks.wait(
            lambda: self._has_verdict_or_is_over() or (may_stop_early and self._callbacks.is_stopping()), deadline
        )
        if self._launcher_assigns_rendezvous and self._callbacks.is_stopping():  # The launcher stops all nodes.
            self._callbacks.wait(self._has_verdict_or_is_over, time.monotonic() + _CLOSE_S)
        return self._verdict

    def _has_verdict_or_is_over(self) -> bool:
        return self._verdict is not None or self._is_over

    def report_failure(self) -> None:
        if self._formed and self._client and self._client.index is not None:
            self._client.send(NodeStops(self._client.index, self._formed.round.attempt))

    def send_report(self, report: Report) -> None:
        if self._client and self._client.index is not None:
            self._client.send(ReportToServer(self._client.index, report))

    def close(self) -> None:
        """Leave the run unless it has ended: otherwise only missing heartbeats would show the loss to other nodes."""
        client = self._client
        if client and client.rejected_count:
            self._callbacks.send(Notice(client.rejected_total()))
        if client is None or client.index is None or self._is_over:
            return
        if self._verdict is None and not client.has_left:
            client.leave()
        if client.has_left:  # A member that is killed while it writes leaves a gap among the coordinator's records.
            limit_s = _SERVER_LEAVES_S if client.is_server else _CLOSE_S
            self._callbacks.wait(lambda: self._is_over, time.monotonic() + limit_s)

    def _leave(self) -> None:
        """Leave the run; the node that serves the rendezvous stays until all other nodes have received the verdict."""
        client = self._client
        if client and client.is_server:
            self._callbacks.wait(lambda: self._all_left or self._is_over, time.monotonic() + _CLOSE_S)
        elif client:
            client.leave()

    # Events.

    def handle_event(self, event: object) -> None:
        serves = self._client is not None and self._client.is_server
        match event:
            case JoinRendezvous(rendezvous=config):
                self._next_config = config
            case OrderToNodes(order=order) if not serves and (own := order.for_own_node(self._endpoint)):
                # The coordinator would send the answers to the launcher of the node that serves the rendezvous.
                self._callbacks.post(own)
            case NodeDeparts(reason=reason):
                self._on_departs(reason)
            case AssignNodes():
                self._on_assigned(event)
            case OrderToNodes() if self._client:
                self._client.send(event)
            case LauncherLost() if self._client:  # A WorkersEnded with ``stopped`` would end the run on all nodes.
                self._client.leave()

    def _on_assigned(self, event: AssignNodes) -> None:
        """Of the rendezvous that this node will join once its workers have ended, or of the present one, or of none."""
        config, client = self._next_config, self._client
        if config and config.token == event.token:
            config = replace(config, participants=event.participants, departing=event.departing)
            self._next_config = replace(config, spares=event.spares)
        elif client and client.config.token == event.token:
            client.send(event)

    def _on_departs(self, reason: str) -> None:
        """The coordinator learns of it with the next NodeJoined, or with another one if it has got one already."""
        self._departs, client = reason, self._client
        if client and client.index is not None and not self._formed and not self._verdict:
            self._join(client)

    def _handle_record(self, client: RendezvousClient, record: object) -> None:
        """A record of this node's member."""
        if client is not self._client:  # The agent has left that rendezvous meanwhile.
            return
        match record:
            case MemberReady():
                client.on_ready(record)
                if record.rank_holder:
                    self._callbacks.send(Notice(client.equal_ranks_message(record.rank_holder)))
                if not self._launcher_assigns_rendezvous:
                    self._callbacks.send(RunIdAgreed(record.run_id))
            case WaitingNodes():
                if text := client.on_waiting_nodes(record):
                    self._send_notice(text)
            case NoFreePlace(hosts=hosts):
                if not client.is_spare:
                    self._callbacks.send(Notice(client.spare_message(hosts, self._departs)))
                client.is_spare = True
            case RendezvousNotFound(reason=reason, limit_s=limit_s):
                self._send_notice(client.search_message(reason, limit_s))
            case ListenForWorkersStore(attempt=attempt, address=address):
                self._listener = self._listener or client.listen(address)
                port = self._listener.getsockname()[1]
                client.send(WorkersStoreListens(client.index or 0, attempt, client.address, port))
            case RoundFormed():
                self._formed, client.is_spare = record, False
                if record.time_s:
                    self.clock_ahead_s = self._joined_time_s - record.joined_time_s, time.time() - record.time_s
            case StopRound(attempt=attempt):
                self._stopped_attempt = attempt
            case RoundVerdict():
                self._verdict = record
            case AllNodesLeft():
                self._all_left = True
            case ReportOfNode() | NodeSilent() | Notice():
                self._callbacks.send(record)
            case OrderToNodes(order=order):
                self._callbacks.post(order)
            case RecordsRejected(count=count):
                if text := client.on_rejected(count):
                    self._callbacks.send(Notice(text))
            case RendezvousLost():
                self._on_lost(client, record)

    def _on_lost(self, client: RendezvousClient, event: RendezvousLost) -> None:
        if client.lost_reason is None:
            client.lost_reason = event.reason
            if self._launcher_assigns_rendezvous and not client.has_left:
                self._callbacks.send(NeedsRendezvous(client.config.token, event.reason))
        if event.refused_hint:
            raise LaunchError(f"{client.endpoint}: {event.reason}", event.refused_hint, RENDEZVOUS)

    def _send_notice(self, text: str) -> None:
        """Send a message for the user, shown only with --verbose if the launcher reports the progress of all nodes."""
        self._callbacks.send(Notice(text, 1 if self._launcher_assigns_rendezvous else 0))
