"""Findings and differences between nodes in sentences for the user, and what an agent reports of its node.

Used by agents, for failures and refusals, and by the launcher.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ddplaunch.cluster.hosts import fold
from ddplaunch.features.gpus.records import MAX_GPUS, GpuReading, IbPort
from ddplaunch.features.health.records import MAX_FINDINGS, MAX_PORTS, NodeHardware, NodeHealth
from ddplaunch.text import duration, grouped, ranks, size

if TYPE_CHECKING:
    from ddplaunch.config import HealthPolicy
    from ddplaunch.protocol.results import HealthFinding

_THE_GPU = "the GPU "

CLOCK_LIMIT_S = 5.0
MEMORY_TOLERANCE = 0.05
"""Machines of one kind differ by what the kernel keeps for itself."""

_MAX_HOSTS = 200

NOT_READY = "not-ready-"
"""Begin of the names of the rules in ``readiness``."""


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


def of_check(finding: HealthFinding) -> bool:
    """Whether a node is refused for it only with ``--check-first``."""
    return finding.rule.startswith(NOT_READY) or finding.rule == "in-use"


def refused(found: Iterable[HealthFinding], policy: HealthPolicy) -> list[HealthFinding]:
    """Those for which a node is not used; with ``--health warn`` or ``off`` only what ``--check-first`` looks for."""
    return [each for each in found if each.severity == "refuse" and (policy == "refuse" or of_check(each))]


def subject(found: Sequence[HealthFinding]) -> Literal["folder", "check", "hardware"]:
    """What nodes that are not used have failed by: the folder of the logs alone, the check alone, or the hardware."""
    if all(finding.rule.startswith("folder-") for finding in found):
        return "folder"
    return "check" if all(map(of_check, found)) else "hardware"


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


# What should be the same on all nodes of a job and is not.

_COMPARED: tuple[tuple[str, Callable[[NodeHardware], str]], ...] = (
    ("CPUs", lambda node: str(node.cpus) if node.cpus else ""),
    ("GPU models", lambda node: _counted(Counter(gpu.name for gpu in node.gpus if gpu.name))),
    ("GPU memory", lambda node: ", ".join(sorted({size(gpu.memory_bytes) for gpu in node.gpus if gpu.memory_bytes}))),
    ("driver", lambda node: ", ".join(sorted({gpu.driver for gpu in node.gpus} - {""}))),
    ("VBIOS", lambda node: ", ".join(sorted({gpu.vbios for gpu in node.gpus} - {""}))),
    ("MIG", lambda node: ", ".join(sorted({"on" if gpu.is_mig else "off" for gpu in node.gpus}))),
    (
        "power limit",
        lambda node: ", ".join(sorted({f"{gpu.power_limit_w:.0f} W" for gpu in node.gpus if gpu.power_limit_w})),
    ),
    ("active ports", lambda node: _counted(Counter(node.ports))),
)


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))


def between(nodes: Mapping[str, NodeHardware], newcomer: str = "") -> list[str]:
    """A sentence for each thing that differs, by host; what a node does not tell is no difference.

    ``newcomer``: only what this host has and most others have not.
    """
    compared = (*_COMPARED, *_memory(nodes))
    return [text for what, value in compared if (text := _difference(what, nodes, value, newcomer))]


def _memory(nodes: Mapping[str, NodeHardware]) -> tuple[tuple[str, Callable[[NodeHardware], str]], ...]:
    known = [node.memory_bytes for node in nodes.values() if node.memory_bytes]
    if not known or max(known) - min(known) <= MEMORY_TOLERANCE * max(known):
        return ()
    return (("memory", lambda node: size(node.memory_bytes) if node.memory_bytes else ""),)


def _difference(
    what: str, nodes: Mapping[str, NodeHardware], value: Callable[[NodeHardware], str], newcomer: str
) -> str:
    hosts = grouped((found, host) for host, node in nodes.items() if (found := value(node)))
    if len(hosts) < 2:
        return ""
    counts = {found: len(set(names) - {newcomer}) for found, names in hosts.items()}
    usual, *others = sorted(hosts, key=lambda found: (-counts[found], newcomer not in hosts[found], found))
    if newcomer and not any(newcomer in hosts[found] for found in others):
        return ""
    parts = [f"{found} on {fold(hosts[found])}"[:_MAX_HOSTS] for found in (*others, usual)]
    return f"the nodes differ in {what}: {', '.join(parts)}"


def certain_offset(least_s: float, most_s: float) -> float:
    """How far a clock is ahead at least, if that is between the two; below 0: behind."""
    return max(least_s, 0.0) + min(most_s, 0.0)


def clock_text(host: str, offset_s: float) -> str:
    """A sentence if the clock of ``host`` is wrong by ``offset_s`` against the launcher's; empty within the limit."""
    if abs(offset_s) <= CLOCK_LIMIT_S:
        return ""
    return f"the clock of {host} is {duration(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} this machine's"
