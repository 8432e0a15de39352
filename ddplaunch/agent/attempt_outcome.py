"""How an attempt has ended on this node, from the exits of its workers and what else has failed. Pure; in the agent."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.agent.events import AttemptFailure
from ddplaunch.protocol import first_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.protocol.results import Certainty, Outcome, WorkerExit


def final_failure(
    failure: AttemptFailure | None, unkillable_pids: Sequence[int], host: str, out_of_memory: Certainty
) -> AttemptFailure | None:
    """What ends the attempt besides its workers: processes that SIGKILL does not end, or ``failure``, if there is one.

    A helper process that the kernel has killed for lack of memory is said to be.
    """
    if unkillable_pids:
        return AttemptFailure(f"pids {', '.join(map(str, unkillable_pids))} on {host} cannot be killed")
    if failure and failure.returncode == -signal.SIGKILL and out_of_memory != "no":
        return replace(failure, reason=f"{failure.reason}, {first_failure.KILLED_FOR_MEMORY[out_of_memory]}")
    return failure


def outcome(failure: AttemptFailure | None, exits: Sequence[WorkerExit], *, was_stopped: bool) -> Outcome:
    """The outcome on this node; ``was_stopped``: the user, the launcher or other nodes have stopped it."""
    if failure or first_failure.first_failure(exits):
        return "failed"
    return "stopped" if was_stopped else "succeeded"
