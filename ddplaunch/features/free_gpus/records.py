"""What a run says in the register of GPUs, and what an agent that waits tells its launcher. No behaviour is here."""

from __future__ import annotations

from typing import Annotated

from ddplaunch.features.gpus.records import MAX_GPUS
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, Limitless, OneLine, Pid, Seconds, at_most

_MAX_PROCESSES = 512


@dataclass(frozen=True, kw_only=True)
class GpuUser:
    """A run that uses GPUs of this machine or waits for some, or its part on this machine.

    Attributes:
        user: name of the user, from the owner of the file.
        pid: the agent.
        run_id: empty if the user hides it from others.
        since_s: since when it uses or wants the GPUs, in seconds since 1970, only to be shown.
        gpus: PCI addresses, or the UUIDs of MIG instances; none if it waits.
        processes: pid of the agent and of each worker, and when it was started, in the kernel's ticks since boot.
        ticket: of a run that waits: the lower, the earlier it gets GPUs; 0: it does not wait.
        needs: number of GPUs that it waits for.
        wants: it waits for any of these, which are as ``gpus``.
    """

    user: OneLine = ""
    pid: Pid
    run_id: OneLine
    since_s: Seconds
    gpus: Annotated[tuple[OneLine, ...], at_most(MAX_GPUS)] = ()
    processes: Annotated[tuple[tuple[Pid, Limitless], ...], at_most(_MAX_PROCESSES)] = ()
    ticket: Limitless = 0
    needs: Count = 0
    wants: Annotated[tuple[OneLine, ...], at_most(MAX_GPUS)] = ()


@dataclass(frozen=True)
class WaitsForGpus:
    """At the begin of the wait, and when the place or who has the GPUs has changed.

    Attributes:
        text: for the user.
        place: 1 for the run that is next; among those that wait for the same GPUs.
    """

    text: OneLine
    place: Count


@dataclass(frozen=True)
class GpuWaitEnded:
    """The wait has ended after ``waited_s``; ``gpus`` are for the workers, none if the node has got none."""

    waited_s: Seconds
    gpus: OneLine = ""


FROM_AGENT = (WaitsForGpus, GpuWaitEnded)
