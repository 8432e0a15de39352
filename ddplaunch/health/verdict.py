"""Whether the hardware has ended workers. Used by the agent, after an attempt. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.health import wording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.protocol.health import HealthFinding
    from ddplaunch.protocol.results import WorkerExit

WINDOW_S = 60.0
"""A fault of this many seconds before a failure is its cause."""


def with_hardware(exits: Sequence[WorkerExit], faults: Sequence[HealthFinding]) -> tuple[WorkerExit, ...]:
    """``exits`` with the fault of the hardware that has ended each worker; ``faults`` are recent, the first came first.

    A worker that was stopped has failed too if its GPU needs somebody to act: it could not go on, and others waited for
    it.
    """
    return tuple(_judged(exit_, faults) for exit_ in exits)


def _judged(exit_: WorkerExit, faults: Sequence[HealthFinding]) -> WorkerExit:
    own = [fault for fault in faults if fault.is_fault and _concerns(fault, exit_)]
    if exit_.stopped:
        own = [fault for fault in own if fault.severity == "refuse" and fault.gpu is not None]
    if not own or exit_.returncode == 0:
        return exit_
    return replace(exit_, hardware=wording.cause(own[0]), stopped=False)


def _concerns(fault: HealthFinding, exit_: WorkerExit) -> bool:
    return fault.gpu is None or exit_.local_rank in fault.local_ranks
