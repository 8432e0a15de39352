"""What features find out about a run, for its result: ``health``, ``collectives`` and ``injections`` of report.json."""

from __future__ import annotations

from typing import Annotated, Literal

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Seconds, at_most

Severity = Literal["refuse", "warn"]


@dataclass(frozen=True, kw_only=True)
class HealthFinding:
    """One thing that is wrong with a node, or with one of its GPUs.

    An agent sends one, while workers run, when something has happened to the hardware. The launcher adds what only it
    knows: ``host``, ``time_s`` and ``ranks``.

    Attributes:
        time_s: when the launcher learned of it.
        rule: fixed name of the rule, for files and tests, like ``row-remap-failed`` or ``xid-79``.
        text: what is wrong, without host and GPU: ``a row of its memory could not be remapped``.
        action: what the user or the administrator can do; empty if there is nothing.
        severity: ``refuse``: no job should use the node; ``warn``: a job may run.
        is_fault: a worker of this GPU (or of this node) that fails within a minute has failed because of it.
        gpu: NVML's index of the GPU, or that of the driver of another vendor; None: the node.
        uuid: the GPU's UUID; empty if it has none.
        local_ranks: local ranks of the workers that use the GPU; empty for a finding about the node.
        ranks: their ranks; empty before the first attempt.
    """

    host: OneLine = ""
    time_s: Seconds = 0.0
    rule: OneLine
    text: OneLine
    action: OneLine = ""
    severity: Severity = "warn"
    is_fault: bool = False
    gpu: Count | None = None
    uuid: OneLine = ""
    local_ranks: Annotated[tuple[Count, ...], at_most(1 << 12)] = ()
    ranks: Annotated[tuple[Count, ...], at_most(1 << 12)] = ()


@dataclass(frozen=True)
class RankLateness:
    """How late a rank called collectives, in the samples that were taken while the job ran.

    Attributes:
        collectives: number of collectives of all its process groups that were looked at.
        delayed: number of those in which ranks waited noticeably for each other.
        last: number of the delayed ones in which it was the last to call.
        median_s: seconds that it was behind the middle of all ranks, where it was the last; of the newest 1,000.
        p95_s: as ``median_s``: 95 % of them were less.
        cost_share: share of the time, from 0 to 1, for which the job waited for this rank only.
        warning: the sentence that was shown about this rank, or about its host; empty if there was none.
    """

    rank: int
    host: str
    collectives: int = 0
    delayed: int = 0
    last: int = 0
    median_s: float = 0.0
    p95_s: float = 0.0
    cost_share: float = 0.0
    warning: str = ""

    @property
    def last_share(self) -> float:
        """Share of the delayed collectives in which it was the last."""
        return self.last / self.delayed if self.delayed else 0.0


@dataclass(frozen=True)
class Injected:
    """The effect of one ``--inject``.

    Attributes:
        text: the fault as the user wrote it, shortened to 200 characters.
        after_s: seconds from the start of the attempt to the fault; None: it did not happen.
        account: one sentence: what happened, and how the job continued.
    """

    text: str
    after_s: float | None
    account: str
