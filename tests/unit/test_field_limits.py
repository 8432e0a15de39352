"""What another process may write into a record: no number without limits."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import ddplaunch.protocol
from ddplaunch.health.node_history import NodeEvent
from ddplaunch.protocol import results, script_request, start_method
from ddplaunch.protocol.field_types import Limit

NOT_RECEIVED = {
    results.Injected,
    results.Versions,
    results.NodeOfRun,
    results.RankLateness,
    results.HealthFinding,
    results.RunResult,
    results.FunctionResult,
    script_request.Request,
    start_method.StartPlan,
}
"""Dataclasses of ``protocol`` that no process decodes: this process makes them."""

SETTINGS = ("ddplaunch.config", "ddplaunch.timeouts", "ddplaunch.cluster.")
"""Modules of the user's settings, which are checked where they are made."""


def records() -> Iterator[type]:
    for module in pkgutil.iter_modules(ddplaunch.protocol.__path__, "ddplaunch.protocol."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.name:
                yield value
    yield NodeEvent


RECEIVED = [record for record in records() if record not in NOT_RECEIVED and record is not Limit]


def numbers(kind: Any, limits: tuple[Limit, ...] = ()) -> Iterator[tuple[type, tuple[Limit, ...]]]:
    """The numbers in an annotation, each with its limits; those of other records are looked at with these."""
    if typing.get_origin(kind) is typing.Annotated:
        inner, *own = typing.get_args(kind)
        yield from numbers(inner, tuple(own))
    elif kind in (int, float):
        yield kind, limits
    elif typing.get_origin(kind) is not typing.Literal:
        for part in typing.get_args(kind):
            yield from numbers(part)


def is_limited(kind: type, limits: tuple[Limit, ...]) -> bool:
    too_much = (1 << 63, -(1 << 63)) if kind is int else (float("inf"), -float("inf"), float("nan"), 1e300, -1e300)
    return all(any(not limit.accepts(value) for limit in limits) for value in too_much)


@pytest.mark.parametrize("record", RECEIVED, ids=lambda record: record.__name__)
def test_every_number_of_a_record_has_limits(record: type) -> None:
    hints = typing.get_type_hints(record, include_extras=True)
    assert [name for name, kind in hints.items() if not all(is_limited(*each) for each in numbers(kind))] == []


def dataclasses_in(kind: Any) -> set[type]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {kind}.union(*map(dataclasses_in, hints.values()))
    return set().union(*map(dataclasses_in, typing.get_args(kind)))


def test_all_that_records_consist_of_was_looked_at() -> None:
    parts = set().union(*map(dataclasses_in, RECEIVED))
    assert {part for part in parts - set(RECEIVED) if not part.__module__.startswith(SETTINGS)} == set()
