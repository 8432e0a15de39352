"""Evidence of workers that stand still, for tests: built in code, or from real flight records."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddplaunch.features.hangs import rank_list
from ddplaunch.features.hangs.flight_record import parse
from ddplaunch.features.hangs.records import (
    Calls,
    CollectiveCall,
    FlightRecord,
    PendingCall,
    ProcessGroup,
    RankEvidence,
)
from tests.support import golden
from tests.support.runs import Finished

NOON_NS = 1_795_358_857_000_000_000
DATA = Path(__file__).parent.parent / "unit" / "data" / "flight_records.json"
"""Dumps of torch 2.13 with gloo: scenario -> rank -> dump, groups, where, function."""


def done(count: int, operation: str = "all_reduce", group: str = "0", size: int = 3) -> list[CollectiveCall]:
    """The first ``count`` calls of a group, finished."""
    return [call(number, operation, group, size, is_done=True) for number in range(1, count + 1)]


def call(number: int, operation: str = "all_reduce", group: str = "0", size: int = 3, **fields: Any) -> CollectiveCall:
    """One call, not finished. ``group``: the name of its group, a number; ``evidence`` makes a place of it."""
    sizes = ((size,),) if size else ()
    values = {"backend": "gloo", "dtypes": ("Float",), **fields}
    return CollectiveCall(
        group=int(group), number=number, operation=operation, input_sizes=sizes, output_sizes=sizes, **values
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
    known = tuple(ProcessGroup(name, text, rank_list.fold([*members])) for name, (text, members) in named.items())
    places = {int(name): place for place, name in enumerate(named)}
    made = Calls(tuple(replace(call, group=places[call.group]) for call in calls or ()))
    since_ns = tuple(NOON_NS + call.number for call in made.unfinished)
    record = FlightRecord(groups=known, made=made, since_ns=since_ns) if calls is not None else None
    values = {"host": "gpu0", "silent_s": 60.0, "window_s": 5.0, "collectives_moved": False, **fields}
    return RankEvidence(rank=rank, local_rank=rank, pid=100 + rank, flight_record=record, **values)


_WAITS = "done=5, call=6, where='train.py:7 in step'"


def rank_of(rank: int, facts: str) -> RankEvidence:
    """A rank by facts like ``done=2, call=3, cpu_s=5.0``: calls it has finished, the one it is in, and other fields.

    ``waits`` is one in its sixth call, ``call=(1, 'barrier', '1')`` are arguments of ``call``, and ``groups='tp 0 1'``
    is another group with its ranks. Without calls there is no flight record.
    """
    given = golden.keywords(facts.replace("waits,", f"{_WAITS},").replace("waits", _WAITS, facts == "waits"))
    calls = []
    if isinstance(before := given.pop("done", None), int):
        calls = done(before)
    elif before:
        calls = [replace(_call_of(before), is_done=True)]
    calls += [_call_of(given.pop("call"))] if "call" in given else []
    has_record = before is not None or calls
    texts = [text.split() for text in given.pop("groups", "").split(", ") if text]
    groups = {str(number): (name, [*map(int, members)]) for number, (name, *members) in enumerate(texts, 1)}
    if "pending" in given:
        given["pending"] = PendingCall(*given["pending"])
    return evidence(rank, calls if has_record else None, groups, **given)


def _call_of(facts: Any) -> CollectiveCall:
    number, *rest = facts if isinstance(facts, tuple) else (facts,)
    return call(number, *rest[:3], **({"dtypes": (rest[3],)} if len(rest) > 3 else {}))


def ranks_of(text: str) -> list[RankEvidence]:
    """``0,1 waits / 2 done=5``: ranks, each with its facts."""
    parts = [part.partition(" ") for part in text.split(" / ")]
    return [rank_of(int(rank), facts) for ranks, _, facts in parts for rank in ranks.split(",")]


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


HANG_OPTIONS = ("--hang-report", "1", "--hang-timeout", "4", "--shutdown-timeout", "1")


def assert_reported_once(done: Finished, reports: Sequence[dict[str, Any]], where: str = " on node02") -> None:
    """A job of four ranks that ``programs/hangs.py lock`` hung with ``HANG_OPTIONS``: of all launchers, one says it.

    Arguments:
        done: what all launchers wrote.
        reports: their report.json.
        where: the host of rank 2, as it is shown.
    """
    cause = rf"rank 2{where} never joined all_reduce #3 of default_pg \(3 floats\)"
    ends = re.findall(rf"nothing has moved for \d+ s: the job hangs; {cause}", done.err)
    assert len(re.findall("the job seems to hang", done.err)) == 1, done.err
    assert len(re.findall(f"ddplaunch:   {cause}", done.err)) == 1, done.err
    assert len(re.findall(r"ddplaunch:   ranks 0-1, 3 wait there since .*hangs.py:\d+ in all_reduce", done.err)) == 1
    assert len(re.findall(r"ddplaunch:   rank 2 is at hangs.py:\d+ in lock", done.err)) == 1
    assert len(re.findall("ddplaunch: the job failed", done.err)) == 1, done.err
    assert len(ends) == len(reports), done.err
    assert {(report["exit_code"], report["attempts"][-1]["hung"]) for report in reports} == {(87, True)}
