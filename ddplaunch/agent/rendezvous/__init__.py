"""This node's part in the rendezvous: a single node's own rounds, or those agreed with other nodes over a store.

Runs in the agent, main thread only, without torch: the member, which is a process of its own, speaks to the store. Must
not start or stop workers, nor decide anything about rounds: the coordinator does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult, Round
    from ddplaunch.protocol.specs import AgentSpec

    Wait = Callable[[Callable[[], bool], float | Callable[[], float]], bool]
    """Handles events until a condition holds (True), or until a deadline, which may change (False)."""

TELL_S = 30.0
"""For so long a node that takes no part tells the others: by its member, if torch is loaded (``tell_cannot_join``), or
by a process without torch, when the agent ends (``cannot_join``)."""


class Rendezvous:
    """Rounds of a run. The agent calls ``next_round`` and ``finish_round`` in turn while ``attempt_follows``.

    A rendezvous opens one round per attempt and obtains the verdict of all nodes on it. What it does not define does
    nothing: a single node needs only these two.
    """

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

    def tell_cannot_join(self, reason: str, exit_code: int) -> None:
        """This node takes no part: tell the others, which exit with ``exit_code``, if only it can. Must not raise."""

    @property
    def has_joined(self) -> bool:
        """Whether this node has met others, or has heard that the run does not start."""
        return True

    def with_agreed(self, spec: AgentSpec) -> AgentSpec:
        """``spec`` with what the nodes have agreed on before the first round: run id, folder and ``max_restarts``."""
        return spec

    @property
    def why_workers_must_stop(self) -> str | None:
        """Why this node's workers must stop because of other nodes; None while they may run."""
        return None

    @property
    def default_environ(self) -> dict[str, str]:
        """Default environment variables of the next round's workers; the user's variables take precedence."""
        return {}

    @property
    def clock_ahead_s(self) -> tuple[float, float]:
        """How far this node's wall clock is ahead of that of the node that serves the rendezvous, in seconds.

        At least and at most: that node tells when, by its clock, this node's NodeReady had arrived, and when it sent
        the RoundFormed. So much is certain, however long the records were on their way.
        """
        return -math.inf, math.inf

    def report_stop(self) -> None:
        """Report to the other nodes at once that this node stops its workers."""

    def send_report(self, report: Report) -> None:
        """Send a report of a feature to the launcher that watches the job, if that is another node's."""

    def handle_event(self, event: object) -> None:
        """Handle a record of the launcher that the agent does not handle."""

    def on_launcher_lost(self) -> None:
        """This node will stop its workers because its launcher is lost, and the other nodes may go on."""

    def close(self) -> None:
        """Leave the rendezvous if this node still takes part in it."""
