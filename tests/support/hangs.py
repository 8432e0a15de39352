"""Evidence of workers that stand still, for tests: built in code, or from real flight records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddplaunch.hangs.flight_record import parse
from ddplaunch.protocol.hang_evidence import (
    CollectiveCall,
    FlightRecord,
    PendingCall,
    ProcessGroup,
    RankEvidence,
)

NOON_NS = 1_795_358_857_000_000_000
DATA = Path(__file__).parent.parent / "unit" / "data" / "flight_records.json"
"""Dumps of torch 2.13 with gloo: scenario -> rank -> dump, groups, where, function."""


def done(count: int, operation: str = "all_reduce", group: str = "0", size: int = 3) -> list[CollectiveCall]:
    """The first ``count`` calls of a group, finished."""
    return [call(number, operation, group, size, is_done=True) for number in range(1, count + 1)]


def call(number: int, operation: str = "all_reduce", group: str = "0", size: int = 3, **fields: Any) -> CollectiveCall:
    """One call, not finished."""
    sizes = ((size,),) if size else ()
    values = {"backend": "gloo", "dtypes": ("Float",), "created_ns": NOON_NS + number, **fields}
    return CollectiveCall(
        group=group, number=number, operation=operation, input_sizes=sizes, output_sizes=sizes, **values
    )


def evidence(
    rank: int,
    calls: Sequence[CollectiveCall] | None = None,
    groups: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    world: int = 4,
    **fields: Any,
) -> RankEvidence:
    """A rank that stands still, with a flight record if ``calls`` is given."""
    named = {"0": ("default_pg", range(world)), **(groups or {})}
    known = tuple(ProcessGroup(name, text, tuple(members)) for name, (text, members) in named.items())
    record = FlightRecord(groups=known, calls=tuple(calls)) if calls is not None else None
    values = {"host": "gpu0", "silent_s": 60.0, "window_s": 5.0, "collectives_moved": False, **fields}
    return RankEvidence(rank=rank, local_rank=rank, pid=100 + rank, flight_record=record, **values)


def recorded(scenario: str) -> list[RankEvidence]:
    """Evidence from real dumps."""
    return [_recorded(int(rank), found) for rank, found in json.loads(DATA.read_text())[scenario].items()]


def _recorded(rank: int, found: dict[str, Any]) -> RankEvidence:
    groups = {name: (text, tuple(members)) for name, (text, members) in found["groups"].items()}
    function = found["function"]
    peer = 1 if function in ("send", "recv") else None
    return RankEvidence(
        rank=rank,
        local_rank=rank,
        host="gpu0",
        pid=100 + rank,
        silent_s=60.0,
        window_s=5.0,
        collectives_moved=False,
        where=found["where"],
        pending=PendingCall(function, peer) if function else None,
        flight_record=parse(json.dumps(found["dump"]).encode(), groups),
    )
