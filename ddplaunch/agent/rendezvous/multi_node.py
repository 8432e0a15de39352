"""Rendezvous of several nodes: joins, waits for rounds, reports failures, and waits for the verdict of all nodes.

Runs in the agent, main thread only. The node's member of the rendezvous is another process, to which a
``RendezvousClient`` speaks. A launcher that leads all nodes replaces a lost rendezvous by another.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.agent import this_node
from ddplaunch.agent.rendezvous import TELL_S, Rendezvous
from ddplaunch.agent.rendezvous.client import RendezvousClient
from ddplaunch.errors import HARDWARE, RENDEZVOUS, LaunchError
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import (
    AssignNodes,
    AttemptEnded,
    FirstRoundFormed,
    JoinRendezvous,
    NodeDeparts,
    Notice,
    OrderToNodes,
)
from ddplaunch.protocol.rendezvous import NodeCannotJoin, NodeStopsRound, ReportToServer
from ddplaunch.rounds import verdicts
from ddplaunch.text import quote

if TYPE_CHECKING:
    import socket

    from ddplaunch.agent.parts import NodeServices
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult, Round, RoundVerdict
    from ddplaunch.protocol.specs import AgentSpec

_CLOSE_S = 2.0
"""For so long a node that leaves waits for its member to end, and one that the launcher stops for the verdict."""

_SERVER_LEAVES_S = 0.2
"""For so long the member that serves the rendezvous, which then does not end by itself, has to write NodeLeft."""

_VERDICT_S = 30.0
"""Added to the time in which the other nodes stop their workers, or are lost: so late the verdict may come."""

_HARDWARE_HINT = "Start the job without that node; --health warn, on it, uses it all the same."
_FAILED_HINT = "The launcher on that node has printed more."


class MultiNodeRendezvous(Rendezvous):
    """One node's part in a rendezvous of several nodes."""

    def __init__(self, node: NodeServices, local_world_size: int) -> None:
        self._node, self._spec = node, node.spec
        self._one_launcher_leads = node.spec.one_launcher_leads
        self._local_world_size = local_world_size
        self._next_config = node.spec.rendezvous
        """Of the rendezvous that this node joins next. If the launcher assigns one, the present one is over."""
        self._client: RendezvousClient | None = None
        self._next_attempt = self._restart_count = 0
        self._is_agreed = False
        self._why_departs = ""
        self._join_until = NEVER
        self._others_import = False
        """Other nodes may still import torch, so that the time to join has not begun."""

    @property
    def has_joined(self) -> bool:
        return self._client is not None and bool(self._client.ready or self._client.cannot_start)

    @property
    def _cannot_start(self) -> bool:
        return self._client is not None and self._client.cannot_start is not None

    @property
    def why_workers_must_stop(self) -> str | None:
        if self._why_over is not None:
            return self._why_over
        client = self._client
        is_stopped = client and client.formed and client.formed.round.attempt == client.stopped_attempt
        return "another node stopped the workers" if is_stopped else None

    @property
    def _why_over(self) -> str | None:
        """Why this node's rendezvous is over for it: it is lost, or the launcher has assigned another; None if not."""
        client = self._client
        if self._one_launcher_leads and self._next_config and client:
            return "a new rendezvous has begun"
        if client is None or client.lost_reason is None:
            return None
        return f"the rendezvous at {client.endpoint} is lost: {client.lost_reason}"

    @property
    def _is_over(self) -> bool:
        return self._why_over is not None

    @property
    def _endpoint(self) -> str:
        """Where the node that serves the rendezvous is, for the user."""
        return self._client.endpoint if self._client else "the node that serves the rendezvous"

    @property
    def default_environ(self) -> dict[str, str]:
        return self._client.default_environ if self._client else {}

    @property
    def clock_ahead_s(self) -> tuple[float, float]:
        return self._client.clock_ahead_s if self._client else super().clock_ahead_s

    # Before a round.

    def next_round(self) -> tuple[Round, socket.socket | None] | None:
        while not self._node.is_stopping():
            if (client := self._client) and not self._is_over:
                self._start_clock(client)
            else:
                client = self._connect()
            if client is None or not client.ready:
                continue
            self._await_round(client)
            if client.verdict and not client.formed:
                self._finish_without_round(client, client.verdict)
                return None
            if client.formed and not self._node.is_stopping():
                self._next_attempt = client.formed.round.attempt + 1
                return client.formed.round, client.take_store_listener()
        return None

    def _await_round(self, client: RendezvousClient) -> None:
        self._join(client)
        self._wait_for(lambda: bool(client.formed or client.verdict), lambda: self._join_deadline(client))

    def _join(self, client: RendezvousClient) -> None:
        saved = self._node.saved()
        client.join(self._local_world_size, self._next_attempt, self._why_departs, self._restart_count, saved)

    def with_agreed(self, spec: AgentSpec) -> AgentSpec:
        client = self._client
        if self._one_launcher_leads or self._is_agreed or not (client and client.ready and client.formed):
            return spec
        self._is_agreed, ready, formed = True, client.ready, client.formed
        place = f"{spec.host}.{formed.round.node_rank}"
        names = (place,) if formed.shares_host else (spec.host, place)
        spec, moved_to = this_node.moved_into_run(spec, ready, names, self._node.outbox.send)
        self._node.outbox.send(FirstRoundFormed(moved_to))
        limit = formed.max_restarts
        if limit != spec.max_restarts:
            text = f"warning: --max-restarts is {spec.max_restarts} on {spec.host}, and {limit} on the node that "
            self._node.outbox.send(Notice(f"{text}serves the rendezvous at {client.endpoint}: {limit} counts"))
        return replace(spec, run_id=ready.run_id, max_restarts=limit)

    def _finish_without_round(self, client: RendezvousClient, verdict: RoundVerdict) -> None:
        """Report the end of a run whose last round this node has only waited for, as a spare or while it was stopped.

        Raises:
            LaunchError: the run rejects this node, such as one that joins after its end: nothing was decided for it.
        """
        if not client.has_no_place and verdict.rejects_node:
            raise LaunchError(f"{client.endpoint}: {quote(verdict.reason, 1000)}", "", RENDEZVOUS)
        self._leave(client)
        self._node.outbox.send(Notice(f"the run has ended; {self._spec.host} was not needed"))
        self._node.outbox.send(AttemptEnded(verdicts.of_spare(verdict)))

    def tell_cannot_join(self, reason: str, exit_code: int) -> None:
        """As ``Rendezvous.tell_cannot_join``. Without it the others would wait until the end of their patience."""
        config = self._next_config
        if config is None or self._one_launcher_leads:
            return
        is_fixed = config.min_nodes == config.max_nodes
        with contextlib.suppress(LaunchError):  # Then there is nobody to tell.
            client = self._connect(TELL_S, is_wanted=lambda client: client.is_server or is_fixed)
            if client and client.ready:
                client.send(NodeCannotJoin(client.ready.node_index, reason, exit_code))
                self._await_others(client)

    def _await_others(self, client: RendezvousClient) -> None:
        """On the node that serves the rendezvous: stay until the others have heard that the job does not start."""
        if client.is_server:
            client.tell_progress(f"telling the other nodes that the job does not start, for up to {TELL_S:.0f} s")
            is_done = lambda: client.all_left or self._is_over or self._node.is_stopping()  # noqa: E731
            self._node.wait(is_done, time.monotonic() + TELL_S)

    def _connect(
        self, limit_s: float = NEVER, is_wanted: Callable[[RendezvousClient], bool] = lambda _: True
    ) -> RendezvousClient | None:
        """Connect to the next rendezvous, once it is known. None if this node must stop before, or if not wanted.

        ``limit_s`` and the limit of the rendezvous count from the moment at which torch is imported.
        """
        if self._client:
            self._client.close()
            self._client = None
        self._node.wait(lambda: self._next_config is not None or self._node.is_stopping(), NEVER)
        config, self._next_config = self._next_config, None
        if config is None:
            return None
        self._client = client = RendezvousClient(self._node, config)
        if not is_wanted(client):
            return None
        client.connect()
        self._start_clock(client)
        self._others_import = self._one_launcher_leads and not config.attempt
        self._wait_for(lambda: client.ready is not None, min(self._join_until, time.monotonic() + limit_s))
        return client

    def _start_clock(self, client: RendezvousClient) -> None:
        """The time for meeting the other nodes begins: this node has imported torch, or its attempt has ended."""
        self._join_until, self._others_import = time.monotonic() + client.config.join_timeout_s, False

    def _join_deadline(self, client: RendezvousClient) -> float:
        """Deadline of the wait for a round, as ``time.monotonic()``, of a node that has joined.

        Once MIN nodes have come, they wait for more. A spare may wait for the whole run. Before the first attempt, a
        launcher that leads all nodes watches those that still import torch.
        """
        if client.has_no_place or self._others_import:
            return NEVER
        return self._join_until + (0.0 if client.waiting_nodes.missing else client.config.last_call_timeout_s)

    def _wait_for(self, done: Callable[[], bool], deadline: float | Callable[[], float]) -> None:
        """Wait until ``done``, the rendezvous is lost, or this node must stop.

        Raises:
            LaunchError: the run does not start, the deadline has passed, or the rendezvous is lost and the launcher
                assigns no other.
        """
        is_done = lambda: done() or self._is_over or self._cannot_start or self._node.is_stopping()  # noqa: E731
        is_in_time, client = self._node.wait(is_done, deadline), self._client
        if client and client.cannot_start:
            self._await_others(client)
            hint = _HARDWARE_HINT if client.cannot_start.exit_code == HARDWARE else _FAILED_HINT
            raise LaunchError(client.cannot_start.reason, hint, client.cannot_start.exit_code)
        if client is None or (self._one_launcher_leads and self._is_over):
            return
        if self._is_over:
            raise client.unreachable_error()
        if not is_in_time:
            raise client.too_few_error()

    # After a round.

    def finish_round(self, result: AttemptResult, *, has_unkillable: bool) -> AttemptResult:
        client, is_stopping = self._client, self._node.is_stopping()
        # The launcher is lost, and the other nodes go on. The agent calls ``next_round``, which returns None.
        if client is None or client.has_left:
            return verdicts.of_node_that_left(result)
        index = client.index or 0
        told = {"is_stopping": is_stopping, "has_unkillable": has_unkillable}
        client.send(verdicts.workers_ended(result, index, **told, saved=self._node.saved()))
        verdict = self._await_verdict(client, result.outcome == "succeeded")
        if verdict is None:
            if not is_stopping and self._why_over:
                return verdicts.of_lost_rendezvous(
                    result, self._why_over, goes_on=self._one_launcher_leads, has_unkillable=has_unkillable
                )
            if self._node.is_stopping():
                return verdicts.of_stopped_node(result, self.why_workers_must_stop)
            return verdicts.of_missing_verdict(result, self.why_workers_must_stop, client.endpoint)
        if not verdict.attempt_follows:
            self._leave(client)
        self._restart_count = result.restart_count + verdict.restart_follows
        return verdicts.with_verdict(result, verdict, is_stopping=is_stopping)

    def _await_verdict(self, client: RendezvousClient, succeeded: bool) -> RoundVerdict | None:
        """The verdict; None if none comes in time. No deadline after a success: other nodes may run for days."""
        stopped_by = time.monotonic() + self._spec.timeouts.shutdown_timeout_s
        if self._node.is_stopping():  # The other nodes, too, mostly by the same order.
            stopped_by = max(stopped_by, self._node.stops_by())
        deadline = NEVER if succeeded else stopped_by + client.config.silent_after_s + _VERDICT_S
        may_stop_early = succeeded or self._one_launcher_leads

        def is_done() -> bool:
            return client.verdict is not None or self._is_over

        self._node.wait(lambda: is_done() or (may_stop_early and self._node.is_stopping()), deadline)
        if self._one_launcher_leads and self._node.is_stopping():  # The launcher stops all nodes.
            self._node.wait(is_done, time.monotonic() + _CLOSE_S)
        return client.verdict

    def report_stop(self) -> None:
        client = self._client
        if client and client.ready and client.formed:
            client.send(NodeStopsRound(client.ready.node_index, client.formed.round.attempt))

    def send_report(self, report: Report) -> None:
        if self._client and self._client.ready:
            self._client.send(ReportToServer(self._client.ready.node_index, report))

    def close(self) -> None:
        if client := self._client:
            client.tell_rejected()
            self._leave_at_end(client)
            client.close()
            self._client = None

    def _leave_at_end(self, client: RendezvousClient) -> None:
        """Leave the run unless it has ended: otherwise only missing heartbeats would show the loss to other nodes."""
        if not client.ready or self._is_over:
            return
        if client.verdict is None and not client.has_left:
            client.leave()
        if client.has_left:  # A member that is killed while it writes leaves a gap among the coordinator's records.
            limit_s = _SERVER_LEAVES_S if client.is_server else _CLOSE_S
            self._node.wait(lambda: self._is_over, time.monotonic() + limit_s)
        elif client.is_server and client.verdict and not client.verdict.attempt_follows:
            # Without it, a node that is slow now would not get the verdict. One that is lost is noticed meanwhile.
            limit_s = client.config.silent_after_s + _CLOSE_S
            self._node.wait(lambda: client.all_left or self._is_over, time.monotonic() + limit_s)

    def _leave(self, client: RendezvousClient) -> None:
        """Leave the run; the node that serves the rendezvous first reports its own result: see ``_leave_at_end``."""
        if not client.is_server:
            client.leave()

    def on_launcher_lost(self) -> None:
        if self._client:  # A WorkersEnded with ``stopped`` would end the run on all nodes.
            self._client.leave()

    # Records of the launcher.

    def handle_event(self, event: object) -> None:
        client = self._client
        serves = client is not None and client.is_server
        match event:
            case JoinRendezvous(rendezvous=config):
                self._next_config = config
            case OrderToNodes(order=order) if not serves and (own := order.for_own_node(self._endpoint)):
                # The coordinator would send the answers to the launcher of the node that serves the rendezvous.
                self._node.post(own)
            case NodeDeparts(reason=reason):
                self._on_departs(reason)
            case AssignNodes():
                self._on_assigned(event)
            case OrderToNodes() if client:
                client.send(event)

    def _on_assigned(self, event: AssignNodes) -> None:
        """Of the rendezvous that this node will join once its workers have ended, or of the present one, or of none."""
        config, client = self._next_config, self._client
        if config and config.token == event.token:
            config = replace(config, assigned=event.assigned, departing=event.departing)
            self._next_config = replace(config, spares=event.spares)
        elif client and client.config.token == event.token:
            client.send(event)

    def _on_departs(self, reason: str) -> None:
        """The coordinator learns of it with the next NodeReady, or with another one if it has got one already."""
        self._why_departs, client = reason, self._client
        if client and not client.formed and not client.verdict:
            self._join(client)
