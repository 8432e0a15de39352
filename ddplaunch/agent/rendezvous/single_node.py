"""Interface between an agent and its rendezvous, and the rendezvous of a single node.

A rendezvous opens one round per attempt and obtains the verdict of all nodes on it. Runs in the agent, main thread
only. Must not start or stop workers, and must not import ``multi_node_rendezvous``, which only several nodes need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.restart_policy import (
    MAX_IDENTICAL_FAILURES,
    reason_not_to_restart,
    reason_to_end,
    reason_to_leave,
)
from ddplaunch.protocol.results import Round
from ddplaunch.system.network import listen

if TYPE_CHECKING:
    import socket

    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult, WorkerExit
    from ddplaunch.protocol.specs import AgentSpec


class Rendezvous(Protocol):
    """Rounds of a run. The agent calls ``next_round`` and ``finish_round`` in turn while ``attempt_follows``.

    Attributes:
        clock_ahead_s: this node's wall clock is ahead of that of the node that serves the rendezvous by so many seconds
            at least, and at most. That node tells when, by its clock, this node's NodeJoined had arrived, and when it
            sent the RoundFormed: so much is certain, however long the records were on their way.
    """

    clock_ahead_s: tuple[float, float]

    def next_round(self) -> tuple[Round, socket.socket | None] | None:
        """Wait for the next round. None at the end of the run.

        Returns:
            The round and, on the first node, the bound socket of the workers' store.

        Raises:
            LaunchError: this node cannot join the other nodes.
        """

    def refuse(self, reason: str) -> None:
        """This node takes no part, for ``reason``: tell the other nodes if only this one can. Does not raise."""

    def complete(self, spec: AgentSpec) -> AgentSpec:
        """``spec`` with what the nodes have agreed on before the first round: the run id, and this node's folder."""

    def finish_round(self, result: AttemptResult) -> AttemptResult:
        """Report this node's ``result`` of the round and wait for the verdict.

        Returns:
            ``result`` with the verdict's outcome, ``attempt_follows`` and cause, and its reason if ``result`` has none.
        """

    @property
    def stop_reason(self) -> str | None:
        """Why this node's workers must stop because of other nodes; None while they may run."""

    @property
    def worker_environ(self) -> dict[str, str]:
        """Default environment variables of the next round's workers; the user's variables take precedence."""

    def report_failure(self) -> None:
        """Report to the other nodes at once that this node stops its workers."""

    def report_activity(self, report: Report) -> None:
        """Report what this node's workers do to the launcher that watches the job, if that is another node's."""

    def handle_event(self, event: object) -> None:
        """Handle an event of the agent's mailbox that the agent does not handle."""

    def close(self) -> None:
        """Leave the rendezvous if this node still takes part in it."""


@dataclass(frozen=True)
class AgentCallbacks:
    """Functions of the agent for a rendezvous of several nodes.

    Attributes:
        wait: handle events until a condition holds; False if a deadline (``time.monotonic()``) came first.
        is_stopping: whether this node must stop.
        has_unkillable: whether processes of this node survived SIGKILL.
        start_member: start the member's process with five descriptors (three streams, the channel, the endpoint's
            socket), and close them in this process.
        send: send a record to the launcher.
        post: post an event to the agent's mailbox; any thread may call it.
    """

    wait: Callable[[Callable[[], bool], float | Callable[[], float]], bool]
    is_stopping: Callable[[], bool]
    has_unkillable: Callable[[], bool]
    start_member: Callable[[list[int]], None]
    send: Callable[[object], None]
    post: Callable[[object], None]


class SingleNodeRendezvous:
    """Rendezvous of a single node: a round opens at once, and this node decides on restarts."""

    stop_reason = None
    clock_ahead_s = (-math.inf, math.inf)

    def __init__(self, spec: AgentSpec, local_world_size: int, restart_forbidden: Callable[[], bool]) -> None:
        self._spec = spec
        self._local_world_size = local_world_size
        self._restart_forbidden = restart_forbidden
        self._attempt = -1
        self._causes: tuple[WorkerExit | None, ...] = ()

    def next_round(self) -> tuple[Round, socket.socket]:
        """As ``Rendezvous.next_round``. Raises a LaunchError if the store cannot listen at its address and port."""
        self._attempt += 1
        address = self._spec.master_addr or "127.0.0.1"
        # A program that was started as one worker and starts others itself (mp.spawn) serves the store in its rank 0.
        has_store = self._local_world_size > 1
        # Bound here, so that no other process gets the port.
        listener = listen(self._spec.host, address, self._spec.master_port or 0, only_reserve=not has_store)
        round_ = Round(
            attempt=self._attempt,
            restart_count=self._attempt,
            node_rank=0,
            nnodes=1,
            first_rank=0,
            local_world_size=self._local_world_size,
            world_size=self._local_world_size,
            master_addr=address,
            master_port=listener.getsockname()[1],
            has_store=has_store,
        )
        return round_, listener

    def refuse(self, reason: str) -> None: ...

    def complete(self, spec: AgentSpec) -> AgentSpec:
        return spec

    def finish_round(self, result: AttemptResult) -> AttemptResult:
        self._causes = (*self._causes, first_failure.first_failure(result.exits))[-MAX_IDENTICAL_FAILURES:]
        may_restart = result.outcome == "failed" and not self._restart_forbidden()
        if may_restart and (leaves := reason_to_leave(result.exits)):
            if not (why_not := reason_not_to_restart(self._causes)):
                why_not, result = reason_to_end(leaves, remaining=0, needed=1), replace(result, node_leaves=leaves)
            return replace(result, reason=result.reason or why_not)
        may_restart = may_restart and result.attempt < self._spec.max_restarts
        why_not = reason_not_to_restart(self._causes) if may_restart else ""
        return replace(result, attempt_follows=may_restart and not why_not, reason=result.reason or why_not)

    @property
    def worker_environ(self) -> dict[str, str]:
        return {}

    def report_failure(self) -> None: ...

    def report_activity(self, report: Report) -> None: ...

    def handle_event(self, event: object) -> None: ...

    def close(self) -> None: ...
