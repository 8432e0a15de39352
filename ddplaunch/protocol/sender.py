"""Whose records are: a record names the host of the node that has sent it, whatever its sender wrote.

Used by whoever knows the sender by its connection: the launcher, and the coordinator. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddplaunch.features.debug.records import SessionOpened
from ddplaunch.features.health.records import HardwareOfNode
from ddplaunch.features.slow_ranks.records import CollectivesSampled
from ddplaunch.protocol.launcher_agent import AttemptEnded, Output, WorkerActivity, WorkersExamined
from ddplaunch.protocol.results import WorkerExit


def of_host(host: str, record: Any) -> Any:
    """``record`` of a node on ``host``, which names no other host as its own. What names none is returned as it is.

    ``AttemptResult.cause`` stays: the first failure of a job may be on another node.
    """
    match record:
        case Output() | WorkerActivity() | CollectivesSampled() | SessionOpened() | HardwareOfNode() | WorkerExit():
            return _on(host, record)
        case WorkersExamined(ranks=ranks, node=node):
            return replace(record, ranks=_all_on(host, ranks), node=node and _on(host, node))
        case AttemptEnded(result=result, evidence=evidence):
            own = replace(result, exits=_all_on(host, result.exits))
            return replace(record, result=own, evidence=_all_on(host, evidence))
    return record


def _on(host: str, named: Any) -> Any:
    return named if named.host == host else replace(named, host=host)


def _all_on(host: str, each_named: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_on(host, each) for each in each_named)
