"""Interface between an agent and its rendezvous, and the rendezvous of a single node.

A rendezvous opens one round per attempt and obtains the verdict of all nodes on it. Runs in the agent, main thread
only. Must not start or stop workers, nor decide anything about rounds: the coordinator does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ddplaunch.system.network import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ddplaunch.agent.events import Wait
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult, Round
    from ddplaunch.protocol.specs import AgentSpec
    from ddplaunch.rounds.coordinator import Coordinator


T = TypeVar("T")


class Rendezvous:
    """Rounds of a run. The agent calls ``next_round`` and ``finish_round`` in turn while ``attempt_follows``.

    What a rendezvous does not define does nothing: a single node needs only these two.

    Attributes:
        clock_ahead_s: this node's wall clock is ahead of that of the node that serves the rendezvous by so many seconds
            at least, and at most. That node tells when, by its clock, this node's NodeJoined had arrived, and when it
            sent the RoundFormed: so much is certain, however long the records were on their way.
    """

    clock_ahead_s = (-math.inf, math.inf)

    def next_round(self) -> tuple[Round, socket.socket | None] | None:
        """Wait for the next round. None at the end of the run.

        Returns:
            The round and, on the first node, the bound socket of the workers' store.

        Raises:
            LaunchError: this node cannot join the other nodes.
        """
        raise NotImplementedError

    def finish_round(self, result: AttemptResult, *, has_unkillable: bool) -> AttemptResult:
        """Report this node's ``result`` of the round, and wait for the verdict. Returns ``result`` with the verdict.

        ``has_unkillable``: processes of this node survived SIGKILL.
        """
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """This node takes no part, for ``reason``: tell the other nodes if only this one can. Does not raise."""

    def complete(self, spec: AgentSpec) -> AgentSpec:
        """``spec`` with what the nodes have agreed on before the first round: the run id, and this node's folder."""
        return spec

    @property
    def stop_reason(self) -> str | None:
        """Why this node's workers must stop because of other nodes; None while they may run."""
        return None

    @property
    def worker_environ(self) -> dict[str, str]:
        """Default environment variables of the next round's workers; the user's variables take precedence."""
        return {}

    def report_failure(self) -> None:
        """Report to the other nodes at once that this node stops its workers."""

    def send_report(self, report: Report) -> None:
        """Send a report of a feature to the launcher that watches the job, if that is another node's."""

    def handle_event(self, event: object) -> None:
        """Handle an event of the agent's mailbox that the agent does not handle."""

    def close(self) -> None:
        """Leave the rendezvous if this node still takes part in it."""


class AgentCallbacks(NamedTuple):
    """Functions of the agent for a rendezvous.

    Attributes:
        wait: handle events until a condition holds; False if a deadline (``time.monotonic()``) came first.
        is_stopping: whether this node must stop.
        start_member: start the member's process with five descriptors (three streams, the channel, the endpoint's
            socket), and close them in this process.
        send: send a record to the launcher.
        post: as in ``NodeServices``.
    """

    wait: Wait
    is_stopping: Callable[[], bool]
    start_member: Callable[[list[int]], None]
    send: Callable[[object], None]
    post: Callable[[object], None]


class SingleNodeRendezvous(Rendezvous):
    """Rendezvous of a single node: it has a coordinator for itself, without a store."""

    def __init__(self, spec: AgentSpec, local_world_size: int, callbacks: AgentCallbacks) -> None:
        self._spec = spec
        self._local_world_size = local_world_size
        self._callbacks = callbacks

    @cached_property
    def _coordinator(self) -> Coordinator:
        from ddplaunch.rounds.coordinator import Coordinator  # Here the forkserver already starts.
        from ddplaunch.rounds.verdict import Restarts

        return Coordinator(server=0, min_nodes=1, max_nodes=1, restarts=Restarts(self._spec.max_restarts))

    def next_round(self) -> tuple[Round, socket.socket]:
        """As ``Rendezvous.next_round``. Raises a LaunchError if the store cannot listen at its address and port."""
        from ddplaunch.protocol.rendezvous import NodeJoined, RoundFormed, WorkersStoreListens

        spec, size, attempt = self._spec, self._local_world_size, self._coordinator.attempt
        address = spec.master_addr or "127.0.0.1"
        # A program that was started as one worker and starts others itself (mp.spawn) serves the store in its rank 0.
        has_store = size > 1
        # Bound here, so that no other process gets the port.
        listener = listen(spec.host, address, spec.master_port or 0, only_reserve=not has_store)
        self._coordinator.receive(NodeJoined(0, spec.host, size))
        listens = WorkersStoreListens(0, attempt, address, listener.getsockname()[1])
        return replace(self._answer(RoundFormed, listens).round, has_store=has_store), listener

    def finish_round(self, result: AttemptResult, *, has_unkillable: bool) -> AttemptResult:
        from ddplaunch.protocol.results import RoundVerdict
        from ddplaunch.rounds import verdict as verdicts

        is_stopping = self._callbacks.is_stopping()
        ended = verdicts.report(result, 0, is_stopping=is_stopping, has_unkillable=has_unkillable)
        verdict = replace(self._answer(RoundVerdict, ended), cause=None, reason="")  # ``result`` says both.
        return verdicts.with_verdict(result, verdict, is_stopping=is_stopping)

    def _answer(self, kind: type[T], record: object) -> T:
        """The coordinator's answer to ``record``."""
        return next(sent.record for sent in self._coordinator.receive(record) if isinstance(sent.record, kind))
