"""Whose records are: a record names the host of the node that has sent it, whatever its sender wrote.

Used by whoever knows the sender by its connection: the launcher, and the coordinator. Pure.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from ddplaunch.protocol.launcher_agent import ReportOfNode


class OfRanks:
    """Base of the records in which a node names ranks: all of them must be its own. A list names none of them twice."""

    attempt: int

    @property
    def named_ranks(self) -> list[int] | set[int]:
        """The ranks that the record is about."""
        raise NotImplementedError


def of_host(host: str, record: Any) -> Any:
    """``record`` of a node on ``host``, which names no other host as its own. What names none is returned as it is.

    A record with a ``host`` is replaced, or the records in its fields that have one. ``AttemptResult.cause`` stays: the
    first failure of a job may be on another node. A ReportOfNode is of another node, and the coordinator knows whose.
    """
    if isinstance(record, ReportOfNode):
        return record
    if hasattr(record, "host"):
        return record if record.host == host else replace(record, host=host)
    if isinstance(record, tuple):
        return tuple(of_host(host, each) for each in record)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "cause"}
    changed = {name: own for name, value in values.items() if (own := of_host(host, value)) != value}
    return replace(record, **changed) if changed else record
