"""The record about this node's health, from what a look at it has found. Runs in the agent, at a start and for --check.

Must import nothing of GPUs: most machines have none, and a start waits for this module.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.protocol.health import MAX_FINDINGS, MAX_GPUS, MAX_PORTS, Finding, GpuIdentity, NodeHardware, NodeHealth

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.system.gpus.gpu_health import GpuHealth
    from ddplaunch.system.infiniband import IbPort


def node_health(
    findings: Iterable[Finding], gpus: Iterable[GpuHealth] = (), ports: Iterable[IbPort] = (), missing: str = ""
) -> NodeHealth:
    """What is wrong with this node, the worst first, and what its machine has; ``missing`` is as in NodeHealth."""
    ordered = sorted(findings, key=lambda finding: (finding.severity != "refuse", finding.gpu or 0))
    active = [f"{port.link_layer} {port.rate_gbps} Gb/s".strip() for port in ports if port.state == "ACTIVE"]
    hardware = NodeHardware(
        gpus=tuple(map(_identity, gpus))[:MAX_GPUS],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cpus=len(os.sched_getaffinity(0)),
        ports=tuple(active[:MAX_PORTS]),
    )
    return NodeHealth(findings=tuple(ordered[:MAX_FINDINGS]), hardware=hardware, missing=missing)


def _identity(gpu: GpuHealth) -> GpuIdentity:
    return GpuIdentity(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes or 0,
        driver=gpu.driver,
        vbios=gpu.vbios,
        is_mig=bool(gpu.is_mig),
        power_limit_w=gpu.power_limit_w or 0.0,
    )
