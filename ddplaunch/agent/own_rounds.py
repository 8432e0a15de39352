"""Where an agent's rounds come from: what every source of rounds offers, and the one for a single node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ddplaunch import verdict
from ddplaunch.agent.endpoint import listen
from ddplaunch.model import Round
from ddplaunch.prospects import IN_A_ROW, why_hopeless

if TYPE_CHECKING:
    import socket

    from ddplaunch.model import AgentSpec, AttemptResult, WorkerExit


class Rounds(Protocol):
    """One after the other: ``next``, then ``over`` with what became of it."""

    def next(self) -> tuple[Round, socket.socket | None] | None:
        """The next round, and the socket of its store on the first node; None if there is none any more."""

    def over(self, result: AttemptResult) -> AttemptResult:
        """The result as all nodes see it, with ``restarts`` set; ``note`` says why not, where one was left."""

    @property
    def must_stop(self) -> str:
        """Why this node's workers must stop, though nothing happened here; empty if they need not."""

    @property
    def worker_environ(self) -> dict[str, str]:
        """Variables that the next round's workers get where nobody has set them."""

    def alarm(self) -> None:
        """A worker has failed here; the other nodes shall know at once."""

    def apply(self, event: object) -> None:
        """Take an event of the agent's mailbox that nobody else knows."""

    def close(self) -> None:
        """Leave; nothing more is asked."""


@dataclass(frozen=True)
class Means:
    """What the agent lends to its rounds. ``wait`` as ``Agent._wait``; ``must_end``: this node was told to stop.

    ``start_member`` starts the member's process with four descriptors and the channel behind them; ``tell`` sends the
    launcher a record.
    """

    wait: Callable[[Callable[[], bool], float | Callable[[], float]], bool]
    must_end: Callable[[], bool]
    start_member: Callable[[list[int]], None]
    tell: Callable[[object], None]
    post: Callable[[object], None]


def rounds_for(spec: AgentSpec, local_world_size: int, means: Means, must_end: Callable[[], bool]) -> Rounds:
    """Those of a lone node, which ends where it ``must_end``, or those that it agrees on with others."""
    if not spec.meeting and not spec.is_led:
        return OwnRounds(spec, local_world_size, must_end)
    from ddplaunch.agent.agreed_rounds import AgreedRounds  # Nodes that meet nobody need not wait for it.

    return AgreedRounds(spec, local_world_size, means)


class OwnRounds:
    """One node: nobody to agree with."""

    must_stop = ""

    def __init__(self, spec: AgentSpec, local_world_size: int, must_end: Callable[[], bool]) -> None:
        self._spec = spec
        self._local_world_size = local_world_size
        self._must_end = must_end
        self._attempt = -1
        self._causes: tuple[WorkerExit | None, ...] = ()

    def next(self) -> tuple[Round, socket.socket | None]:
        self._attempt += 1
        return open_round(self._spec, self._local_world_size, self._attempt)

    def over(self, result: AttemptResult) -> AttemptResult:
        self._causes = (*self._causes, verdict.first_failure(result.exits))[-IN_A_ROW:]
        may = result.outcome == "failed" and result.attempt < self._spec.max_restarts and not self._must_end()
        why_not = why_hopeless(self._causes) if may else ""
        return replace(result, restarts=may and not why_not, note=result.note or why_not)

    @property
    def worker_environ(self) -> dict[str, str]:
        return {}

    def alarm(self) -> None: ...

    def apply(self, event: object) -> None: ...

    def close(self) -> None: ...


def open_round(spec: AgentSpec, local_world_size: int, attempt: int) -> tuple[Round, socket.socket]:
    """The round of a one-node job, and the socket its store will serve: bound now, so that the port is never free.

    Raises:
        LaunchError: the address is not this node's, or the port is taken.
    """
    address = spec.master_addr or "127.0.0.1"
    listener = listen(spec.host, address, spec.master_port or 0)
    round_ = Round(
        attempt=attempt,
        restarts=attempt,
        node_rank=0,
        nnodes=1,
        first_rank=0,
        local_world_size=local_world_size,
        world_size=local_world_size,
        master_addr=address,
        master_port=listener.getsockname()[1],
    )
    return round_, listener
