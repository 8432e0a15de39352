"""Findings: their sentences for the user, whether they explain that a worker has failed, and all those of a node.

Used by agents, for failures and refusals, and by the launcher.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.gpus.records import MAX_GPUS
from ddplaunch.features.health.records import MAX_FINDINGS, MAX_PORTS, NodeHardware, NodeHealth
from ddplaunch.text import ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddplaunch.features.gpus.records import GpuReading, IbPort
    from ddplaunch.protocol.results import HealthFinding, WorkerExit

WINDOW_S = 60.0
"""A fault of this many seconds before a failure is its cause."""

_THE_GPU = "the GPU "


def gpu(finding: HealthFinding) -> str:
    """``GPU 3 (GPU-8f6a...)``; empty for a finding about the node."""
    if finding.gpu is None:
        return ""
    return f"GPU {finding.gpu} ({finding.uuid})" if finding.uuid else f"GPU {finding.gpu}"


def cause(finding: HealthFinding) -> str:
    """Why a worker has failed: ``Xid 79, GPU 3 (GPU-8f6a...) has fallen off the bus``."""
    subject = gpu(finding)
    if not subject:
        return finding.text
    before, found, after = finding.text.partition(_THE_GPU)
    if found:
        return f"{before.replace(': ', ', ')}{subject} {after}"
    return f"{subject}: {finding.text}"


def line(finding: HealthFinding, host: str, first_rank: int | None = None) -> str:
    """One line for the user; ``first_rank`` is the global rank of the node's local rank 0, if it is known."""
    subject = f"{gpu(finding)}{_users(finding, first_rank)}"
    action = f" ({finding.action})" if finding.action else ""
    return f"{host}: {subject}{': ' if subject else ''}{finding.text}{action}"


def _users(finding: HealthFinding, first_rank: int | None) -> str:
    if not finding.local_ranks:
        return ""
    local = f", local {ranks(finding.local_ranks)}"
    return local if first_rank is None else f"{local}, {ranks(first_rank + local for local in finding.local_ranks)}"


def refusal(findings: Sequence[HealthFinding], host: str) -> str:
    """One line on a node that is not used."""
    wrong = [finding for finding in findings if finding.severity == "refuse"]
    more = f"; and {len(wrong) - 1} more" if wrong[1:] else ""
    return f"{line(wrong[0], host)}{more}"


def with_hardware(exits: Sequence[WorkerExit], faults: Sequence[HealthFinding]) -> tuple[WorkerExit, ...]:
    """``exits`` with the fault of the hardware that has ended each worker; ``faults`` are recent, the first came first.

    A worker that was stopped has failed too if its GPU needs somebody to act: it could not go on, and others waited for
    it.
    """
    return tuple(_blamed(exit_, faults) for exit_ in exits)


def _blamed(exit_: WorkerExit, faults: Sequence[HealthFinding]) -> WorkerExit:
    own = [fault for fault in faults if fault.is_fault and _concerns(fault, exit_)]
    if exit_.stopped:
        own = [fault for fault in own if fault.severity == "refuse" and fault.gpu is not None]
    if not own or exit_.returncode == 0:
        return exit_
    return replace(exit_, hardware=cause(own[0]), stopped=False)


def _concerns(fault: HealthFinding, exit_: WorkerExit) -> bool:
    return fault.gpu is None or exit_.local_rank in fault.local_ranks


# All findings of a node, and what its machine has.


def node_health(
    findings: Iterable[HealthFinding], gpus: Iterable[GpuReading] = (), ports: Iterable[IbPort] = ()
) -> NodeHealth:
    """What is wrong with this node, the worst first, and what its machine has."""
    ordered = sorted(findings, key=lambda finding: (finding.severity != "refuse", finding.gpu or 0))
    active = [f"{port.link_layer} {port.rate_gbps} Gb/s".strip() for port in ports if port.state == "ACTIVE"]
    hardware = NodeHardware(
        gpus=tuple(gpu.identity() for gpu in gpus)[:MAX_GPUS],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cpus=len(os.sched_getaffinity(0)),
        ports=tuple(active[:MAX_PORTS]),
    )
    return NodeHealth(findings=tuple(ordered[:MAX_FINDINGS]), hardware=hardware)
