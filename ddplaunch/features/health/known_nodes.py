"""``--ps --nodes``: the nodes in which earlier runs have found faults. Runs in the user's process; reads one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.health import node_history, node_memory
from ddplaunch.text import table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ddplaunch.features.health.node_history import NodeEvent

_HEAD = ("host", "effect", "until", "what", "GPU", "when", "run")


def list_all(show: Callable[[str], None], report: Callable[[str], None]) -> None:
    """List what is known: ``show`` prints the table, ``report`` a message."""
    events, problem = node_memory.remembered()
    if problem:
        report(problem)
    if events:
        show(node_table(events))
    else:
        report("nothing is known about any node")


def node_table(events: Sequence[NodeEvent]) -> str:
    """One line per event, by host, the oldest first."""
    suspects = node_history.suspects(events)
    rows = [_row(event, suspects) for event in sorted(events, key=lambda event: (event.host, event.time_s))]
    return "\n".join(table([_HEAD, *rows]))


def _row(event: NodeEvent, suspects: Collection[str]) -> tuple[str, ...]:
    return (
        event.host,
        "used last" if event.host in suspects else "none yet",
        node_history.day(event.time_s + node_history.KEEP_S),
        event.text,
        event.uuid,
        node_history.day(event.time_s),
        event.run_id,
    )
