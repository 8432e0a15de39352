"""What an agent finds out about the hardware of its node, for the launcher.

An agent sends one NodeHealth before its first attempt, and a HealthFinding for each later one; HardwareOfNode takes
the way over the rendezvous. No behaviour belongs here: ``health`` has the rules.
"""

from __future__ import annotations

from typing import Annotated, Literal

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Seconds, Size, at_most
from ddplaunch.protocol.gpus import MAX_GPUS, Gpu

MAX_FINDINGS = 256
MAX_PORTS = 256

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


@dataclass(frozen=True, kw_only=True)
class NodeHardware:
    """What should be the same on all nodes of a job. Empty or 0: not known.

    Attributes:
        gpus: the GPUs of the job on this node.
        memory_bytes: main memory of the machine.
        cpus: CPUs that the agent may use.
        ports: the kind of each active InfiniBand and RoCE port, as ``InfiniBand 400 Gb/s``.
    """

    gpus: Annotated[tuple[Gpu, ...], at_most(MAX_GPUS)] = ()
    memory_bytes: Size = 0
    cpus: Count = 0
    ports: Annotated[tuple[OneLine, ...], at_most(MAX_PORTS)] = ()


@dataclass(frozen=True, kw_only=True)
class NodeHealth:
    """Agent to launcher, once, before its first attempt.

    Attributes:
        findings: by severity, then by GPU.
        missing: why GPUs could not be looked at; empty if they were, or if the node has none.
    """

    findings: Annotated[tuple[HealthFinding, ...], at_most(MAX_FINDINGS)] = ()
    hardware: NodeHardware = NodeHardware()
    missing: OneLine = ""


@dataclass(frozen=True, kw_only=True)
class HardwareOfNode:
    """Agent to the launcher that watches the job, once, where each node has its own launcher: for the comparison.

    Attributes:
        attempt: the node's first.
        clock_ahead_s: its wall clock is at least so far ahead of that of the node that serves the rendezvous; below 0:
            behind; 0: nothing is certain.
    """

    attempt: Count
    host: OneLine
    hardware: NodeHardware
    clock_ahead_s: Seconds = 0.0


FROM_AGENT = (NodeHealth, HealthFinding)
