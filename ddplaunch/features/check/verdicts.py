"""Which hosts do not pass the check, and why: for ``--check-first`` and for the file of those that pass.

Pure; runs in the launcher. What makes a job only a little slower, or is a difference that a job survives, fails no
host: ``page`` warns of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ddplaunch.features.check import deep_check, page
from ddplaunch.features.health import findings, readiness

if TYPE_CHECKING:
    from ddplaunch.config import HealthPolicy
    from ddplaunch.features.check.page import CheckedNode
    from ddplaunch.features.check.queries import NodeGpuRates


def failed(nodes: Sequence[CheckedNode], policy: HealthPolicy, *, needs_torch: bool = True) -> dict[str, str]:
    """Hosts that fail by what they have told, each with a sentence; ``policy``: of ``--health``."""
    found = {node.host: reason for node in nodes if (reason := _of_node(node, policy, needs_torch=needs_torch))}
    return found | _unreachable([node for node in nodes if node.host not in found])


def _of_node(node: CheckedNode, policy: HealthPolicy, *, needs_torch: bool) -> str:
    of_health = node.report.health.findings if node.report.health else ()
    found = [*readiness.strict(of_health), *readiness.broken(page.facts(node))]
    if wrong := findings.refused(found, policy):
        return findings.refusal(wrong, node.host)
    return f"{node.host}: torch cannot be imported" if needs_torch and not node.imports.times_s else ""


def _unreachable(nodes: Sequence[CheckedNode]) -> dict[str, str]:
    """As few hosts as can be without which all others can connect to each other: those in the most failures first.

    Of two that are in as many, the later one: the first host serves the rendezvous.
    """
    names = [node.host for node in nodes]
    pairs = {(node.host, other): why for node in nodes for other, why in node.unreachable if other in names}
    found = dict[str, str]()
    while pairs:
        counts = Counter(host for pair in pairs for host in pair)
        worst = max(counts, key=lambda host: (counts[host], names.index(host)))
        (one, other), why = next((pair, why) for pair, why in pairs.items() if worst in pair)
        found[worst] = f"{worst}: {one} cannot connect to {other}: {why}"
        pairs = {pair: why for pair, why in pairs.items() if worst not in pair}
    return found


def slow(nodes: Sequence[CheckedNode], gpus: Iterable[tuple[str, NodeGpuRates]]) -> dict[str, str]:
    """Hosts with a slow link or a slow GPU, or with GPUs that could not be measured, each with a sentence."""
    with_gpus = {node.host for node in nodes if node.report.gpus}
    measured = [(host, each) for host, each in gpus if host in with_gpus]
    lines = [*page.slow_links(nodes), *deep_check.problems(measured)]
    return {line.partition(": ")[0]: line for line in reversed(lines)}
