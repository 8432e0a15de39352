"""The time limits of a run, as the user set them, checked.

A part of LaunchConfig (see ``config``), used by launcher and agent.
"""

from __future__ import annotations

from typing import Literal

from ddplaunch.errors import OptionError
from ddplaunch.late_dataclass import dataclass

AUTO_HANG_REPORT_S = 300.0

_MAX_S = 7 * 86400.0
"""A longer time is probably a typing mistake, and CPython's lock calls overflow at a few times this value."""


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """Time limits of a run, in seconds.

    Attributes:
        shutdown_timeout_s: from SIGTERM to SIGKILL when workers are stopped.
        hang_report_s: time without any movement after which the launcher reports where the workers are; None: never;
            ``auto``: ``AUTO_HANG_REPORT_S``, or ten times the longest pause so far, whichever is longer.
        hang_timeout_s: time without any movement after which the job counts as hung; None: never.
        busy_timeout_s: as ``hang_timeout_s``, but CPU time, reading and writing do not count as movement; None: never.
        join_timeout_s: how long the nodes of one launcher may take to meet; where each node has a launcher,
            ``RendezvousConfig.join_timeout_s`` counts.
        lost_after_s: time without an answer after which a node is lost; where each node has a launcher,
            ``RendezvousConfig.silent_after_s`` counts.
    """

    shutdown_timeout_s: float = 30.0
    hang_report_s: float | Literal["auto"] | None = "auto"
    hang_timeout_s: float | None = None
    busy_timeout_s: float | None = None
    join_timeout_s: float = 600.0
    lost_after_s: float = 5.0

    def validate(self) -> None:
        """Raise UsageError for an invalid value or combination."""
        limits = {"--hang-timeout": self.hang_timeout_s, "--busy-timeout": self.busy_timeout_s}
        limits |= {} if self.hang_report_s == "auto" else {"--hang-report": self.hang_report_s}
        if not 0 <= self.shutdown_timeout_s <= _MAX_S:
            raise OptionError("--shutdown-timeout", f"{self.shutdown_timeout_s:g}", f"must be 0 to {_MAX_S:g} s")
        for option, limit in limits.items():
            if limit is not None and not 1 <= limit <= _MAX_S:
                raise OptionError(option, f"{limit:g}", f"must be 1 to {_MAX_S:g} s")
