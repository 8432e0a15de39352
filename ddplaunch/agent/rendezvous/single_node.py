"""The rendezvous of a single node: it has a coordinator for itself, without store or member.

Runs in the agent, main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from ddplaunch.agent.rendezvous import Rendezvous
from ddplaunch.system.network import listen

if TYPE_CHECKING:
    import socket

    from ddplaunch.protocol.results import AttemptResult, Round
    from ddplaunch.protocol.specs import AgentSpec
    from ddplaunch.rounds.coordinator import Coordinator

T = TypeVar("T")


class SingleNodeRendezvous(Rendezvous):
    """The rounds of a single node."""

    def __init__(
        self,
        spec: AgentSpec,
        local_world_size: int,
        is_stopping: Callable[[], bool],
        saved: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``is_stopping``: whether somebody stops this node. ``saved``: as in ``NodeServices``."""
        self._spec, self._local_world_size, self._is_stopping, self._saved = spec, local_world_size, is_stopping, saved

    @cached_property
    def _coordinator(self) -> Coordinator:
        from ddplaunch.rounds.coordinator import Coordinator  # Here the forkserver already starts.
        from ddplaunch.rounds.restarts import Restarts

        return Coordinator(server_index=0, min_nodes=1, max_nodes=1, restarts=Restarts(self._spec.max_restarts))

    def next_round(self) -> tuple[Round, socket.socket]:
        """As ``Rendezvous.next_round``. Raises a LaunchError if the store cannot listen at its address and port."""
        from ddplaunch.protocol.rendezvous import NodeReady, RoundFormed, WorkersStoreListens

        spec, size, attempt = self._spec, self._local_world_size, self._coordinator.attempt
        address = spec.master_addr or "127.0.0.1"
        # A program that was started as one worker and starts others itself (mp.spawn) serves the store in its rank 0.
        has_store = size > 1
        # Bound here, so that no other process gets the port.
        listener = listen(spec.host, address, spec.master_port or 0, only_reserve=not has_store)
        self._coordinator.receive(NodeReady(0, spec.host, size, attempt=attempt, saved=self._saved()))
        listens = WorkersStoreListens(0, attempt, address, listener.getsockname()[1])
        return replace(self._answer(RoundFormed, listens).round, has_store=has_store), listener

    def finish_round(self, result: AttemptResult, *, has_unkillable: bool) -> AttemptResult:
        from ddplaunch.protocol.results import RoundVerdict
        from ddplaunch.rounds import verdicts

        is_stopping = self._is_stopping()
        told = {"is_stopping": is_stopping, "has_unkillable": has_unkillable}
        ended = verdicts.workers_ended(result, 0, **told, saved=self._saved())
        verdict = replace(self._answer(RoundVerdict, ended), cause=None, reason="")  # ``result`` says both.
        return verdicts.with_verdict(result, verdict, is_stopping=is_stopping)

    def _answer(self, kind: type[T], record: object) -> T:
        """The coordinator's answer to ``record``."""
        return next(answer for _, answer in self._coordinator.receive(record) if isinstance(answer, kind))
