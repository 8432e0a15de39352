"""What launcher and agents tell each other of a job that hangs; records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkersState = Literal["silent", "heard", "gone"]


@dataclass(frozen=True)
class WorkersAre:
    """Of one node, in ``attempt``: none has written anything for as long as the user allows, or one has since then.

    ``gone``: no word of them is waited for any more.
    """

    attempt: int
    state: WorkersState


@dataclass(frozen=True)
class EndHung:
    """To all agents, since all nodes are silent: note where the workers of ``attempt`` are, and end them as failed."""

    attempt: int
