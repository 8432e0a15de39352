"""Records of ``--inject``: an agent injects a fault into a worker for its launcher. No behaviour belongs here."""

from __future__ import annotations

from typing import Annotated

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, Failure, Quantity, between


@dataclass(frozen=True)
class InjectFault:
    """Launcher to agent: inject fault ``number`` into one worker of ``attempt``; FaultInjected tells that it was.

    Attributes:
        signum: SIGKILL is sent to the worker alone, any other signal to its process group; 0: none.
        code: exit code to report in place of the SIGKILL; None: report the SIGKILL.
        factor: slow the worker down by this factor, in place of a signal.
    """

    number: Count
    attempt: Count
    local_rank: Count
    signum: Annotated[int, between(0, 64)] = 0
    code: Failure | None = None
    factor: Quantity | None = None


@dataclass(frozen=True)
class FaultInjected:
    """Agent to launcher: fault ``number`` was injected. Not sent if the worker had already ended."""

    number: Count


TO_AGENT = (InjectFault,)
FROM_AGENT = (FaultInjected,)
