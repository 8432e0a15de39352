"""What an agent finds out about the hardware of its node, for the launcher.

An agent sends one NodeHealth before its first attempt, and a HealthFinding for each later one; HardwareOfNode takes
the way over the rendezvous. No behaviour belongs here: ``health`` has the rules.
"""

from __future__ import annotations

from typing import Annotated

from ddplaunch.features.gpus.records import MAX_GPUS, Gpu
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Seconds, Size, at_most
from ddplaunch.protocol.launcher_agent import Report
from ddplaunch.protocol.results import HealthFinding

MAX_FINDINGS = 256
MAX_PORTS = 256


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
    """

    findings: Annotated[tuple[HealthFinding, ...], at_most(MAX_FINDINGS)] = ()
    hardware: NodeHardware = NodeHardware()


@dataclass(frozen=True, kw_only=True)
class HardwareOfNode(Report):
    """Agent to the launcher that watches the job, once, where each node has a launcher: for the comparison.

    Attributes:
        attempt: the node's first.
        clock_ahead_s: its wall clock is at least so far ahead of that of the node that serves the rendezvous; below 0:
            behind; 0: nothing is certain.
    """

    attempt: Count
    host: OneLine
    hardware: NodeHardware
    clock_ahead_s: Seconds = 0.0


FROM_AGENT = (NodeHealth, HealthFinding, HardwareOfNode)
