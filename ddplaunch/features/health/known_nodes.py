"""``--ps --nodes``: the nodes in which earlier runs have found faults. Runs in the user's process; reads one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import parse_hosts
from ddplaunch.features.health import node_history, node_memory
from ddplaunch.text import table

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ddplaunch.features.health.node_history import NodeEvent
    from ddplaunch.launcher.request import Request

_HEAD = ("host", "effect", "until", "what", "GPU", "when", "run")


def list_all(request: Request) -> None:
    """List what is known."""
    events, problem = node_memory.remembered()
    if problem:
        request.report(problem)
    if events:
        request.show(node_table(events))
    else:
        request.report("nothing is known about any node")


def forget(request: Request) -> None:
    """``--forget``: forget what is known of some hosts, or of all."""
    text = request.value
    node_memory.forget(None if text == node_memory.ALL else parse_hosts(text, "--forget"), request.report)


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
