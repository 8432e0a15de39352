"""What should be the same on all nodes of a job and is not. Used by the launcher. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddplaunch.cluster.hostlist import fold
from ddplaunch.text import duration, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddplaunch.features.health.records import NodeHardware

CLOCK_LIMIT_S = 5.0
MEMORY_TOLERANCE = 0.05
"""Machines of one kind differ by what the kernel keeps for itself."""

_MAX_HOSTS = 200


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
    hosts: dict[str, list[str]] = {}
    for host, node in nodes.items():
        if found := value(node):
            hosts.setdefault(found, []).append(host)
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
