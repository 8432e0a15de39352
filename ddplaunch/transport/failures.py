"""Failures of hosts that cannot be reached or cannot run the job, and the table that lists them.

Used by the launcher and by the commands that query hosts. Pure: no I/O, no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from ddplaunch.cluster.hosts import fold
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import grouped

if TYPE_CHECKING:
    from ddplaunch.transport.handle import NodeFacts

Cause = Literal[
    "configuration",
    "name",
    "TCP",
    "timeout",
    "protocol",
    "host key",
    "authentication",
    "jump",
    "start",
    "setup",
    "python",
    "ddplaunch",
    "torch",
    "directory",
    "script",
    "agent",
]

UNREACHABLE: tuple[Cause, ...] = ("TCP", "timeout")
"""The host is down, hangs or is cut off; other causes are settings and software, which the user changes."""


@dataclass(frozen=True)
class HostFailure:
    """A host that cannot take part.

    Attributes:
        message: the event, without the host's name: hosts with equal messages share a line of the table.
        hint: a remedy for the user; may be empty.
    """

    host: str
    cause: Cause
    message: str
    hint: str = ""


def failures_table(failures: Iterable[HostFailure]) -> str:
    """One line per failure with the hosts that it applies to, the most frequent first; then the hints."""
    found = list(failures)
    failed = grouped(((failure.cause, failure.message), failure.host) for failure in found)
    hints = dict.fromkeys(failure.hint for failure in found if failure.hint)
    ordered = sorted(failed.items(), key=lambda item: -len(item[1]))
    lines = [f"  {fold(hosts)}: {message}" for (_, message), hosts in ordered]
    return "\n".join(lines + [f"hint: {hint}" for hint in hints])


def check_torch_versions(facts: Mapping[str, NodeFacts]) -> tuple[HostFailure, ...]:
    """Failures of the hosts whose torch version differs from the most frequent one: such a job may hang."""
    versions = Counter(fact.torch for fact in facts.values() if fact.torch)
    if len(versions) < 2:
        return ()
    most_frequent = versions.most_common(1)[0][0]
    others = "most hosts" if len(facts) > 2 else "the other host"
    hint = "All nodes must have one version of torch: --remote-python names the interpreter to use."
    return tuple(
        HostFailure(host, "torch", f"torch {fact.torch}, and {most_frequent} on {others}", hint)
        for host, fact in facts.items()
        if fact.torch not in ("", most_frequent)
    )
