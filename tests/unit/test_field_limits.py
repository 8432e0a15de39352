"""What another process may write into a record: no number without limits, and no word for others than itself."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddplaunch.protocol
from ddplaunch import features
from ddplaunch.features.check.queries import NodeGpuRates
from ddplaunch.features.checkpoints.records import CheckpointSeen
from ddplaunch.features.debug.records import SessionOpened
from ddplaunch.features.faults.records import FaultInjected
from ddplaunch.features.hangs.records import NodeEvidence, RankEvidence, WorkerActivity, WorkersExamined
from ddplaunch.features.health.node_history import NodeEvent
from ddplaunch.features.health.records import HardwareOfNode, NodeHardware
from ddplaunch.features.remote.command_handle import CommandHandle
from ddplaunch.features.slow_ranks.records import CollectivesSampled
from ddplaunch.features.snapshot.records import SnapshotUsed
from ddplaunch.protocol import control, rendezvous, run_result, script_request, specs, wire
from ddplaunch.protocol.field_types import Limit
from ddplaunch.protocol.launcher_agent import (
    FROM_AGENT,
    FROM_OWN_AGENT,
    AttemptEnded,
    FirstRoundFormed,
    OfRanks,
    Order,
    Output,
    Pong,
    Report,
    ReportOfNode,
    RunIdAgreed,
    with_senders_host,
)
from ddplaunch.protocol.results import AttemptResult, HealthFinding, WorkerExit
from ddplaunch.transport.handle import AgentHandle
from ddplaunch.transport.local import LocalHandle

NOT_RECEIVED = {
    run_result.Injected,
    run_result.Versions,
    run_result.NodeOfRun,
    run_result.RankLateness,
    run_result.RunResult,
    run_result.FunctionResult,
    script_request.Request,
    specs.StartPlan,
}
"""Dataclasses of ``protocol`` that no process decodes: this process makes them."""

SETTINGS = ("ddplaunch.config", "ddplaunch.timeouts", "ddplaunch.cluster.")
"""Modules of the user's settings, which are checked where they are made."""


def records() -> Iterator[type]:
    modules = [module.name for module in pkgutil.iter_modules(ddplaunch.protocol.__path__, "ddplaunch.protocol.")]
    folder = Path(features.__path__[0])
    modules += [
        f"ddplaunch.features.{path.parent.name}.{path.stem}"
        for path in folder.glob("*/*")
        if path.name.endswith(("records.py", "queries.py"))
    ]
    for name in modules:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == name:
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
    of_user = {name for base in record.__mro__ if base.__module__.startswith(SETTINGS) for name in base.__annotations__}
    hints = typing.get_type_hints(record, include_extras=True)
    own = {name: kind for name, kind in hints.items() if name not in of_user}
    assert [name for name, kind in own.items() if not all(is_limited(*each) for each in numbers(kind))] == []


FROM_ELSEWHERE = (
    *(*FROM_OWN_AGENT, *rendezvous.FROM_NODE, *rendezvous.FROM_MEMBER, *control.TO_LAUNCHER, *control.FROM_LAUNCHER),
    *(record for direction in ("FROM_AGENT", "TO_LAUNCHER", "FROM_LAUNCHER") for record in features.records(direction)),
    *features.records("FROM_AGENT", "queries"),
    NodeGpuRates,
)
"""What a reader gets that must not trust the sender."""


def of_any_length(kind: Any, limits: tuple[Limit, ...] = ()) -> Iterator[Any]:
    """The texts and lists in an annotation that may have any length, without those within other records."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        inner, *own = typing.get_args(kind)
        yield from of_any_length(inner, tuple(own))
    elif kind is str and not any(limit.longest or not limit.accepts("x" * (1 << 22)) for limit in limits):
        yield kind
    elif origin is not typing.Literal:
        args = typing.get_args(kind)
        if args and args[-1] is Ellipsis and all(limit.accepts((0,) * (1 << 21)) for limit in limits):
            yield kind
        for part in args:
            yield from of_any_length(part)


def test_what_another_machine_may_say_has_a_limit_of_length() -> None:
    orders = [record for record in features.records("TO_AGENT") if issubclass(record, Order)]
    parts, found = set[type]().union(*map(dataclasses_in, (*FROM_ELSEWHERE, *orders))), {}
    for part in parts:
        hints = typing.get_type_hints(part, include_extras=True)
        fields = {field.name: hints[field.name] for field in dataclasses.fields(part)}
        found.update({(part.__name__, name): kind for name, kind in fields.items() if [*of_any_length(kind)]})
    assert found == {}


def dataclasses_in(kind: Any) -> set[type]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {kind}.union(*map(dataclasses_in, hints.values()))
    return set().union(*map(dataclasses_in, typing.get_args(kind)))


def test_all_that_records_consist_of_was_looked_at() -> None:
    parts = set().union(*map(dataclasses_in, RECEIVED))
    assert {part for part in parts - set(RECEIVED) if not part.__module__.startswith(SETTINGS)} == set()


# What only an agent on this machine may say.

OWN = (RunIdAgreed("a"), FirstRoundFormed(("a", "b")), ReportOfNode(0, (0,), WorkerActivity(0)))


@pytest.mark.parametrize("record", OWN, ids=lambda record: type(record).__name__)
def test_an_agent_on_another_machine_cannot_speak_for_the_run(record: object) -> None:
    from ddplaunch.features.ssh.handle import SshHandle

    for handle in (AgentHandle, CommandHandle, SshHandle):
        with pytest.raises(wire.ProtocolError, match="not a record"):
            wire.decode(wire.encode(record), handle.accepted)
    assert wire.decode(wire.encode(record), LocalHandle.accepted) == record


def test_nothing_else_is_reserved_for_this_machine() -> None:
    assert set(FROM_OWN_AGENT) - set(FROM_AGENT) == set(map(type, OWN))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "/etc", "a\0b", "a\nb", "x" * 256, "é" * 128])
def test_a_folder_is_a_name(name: str) -> None:
    for names in ((name,), ("run", name), (name, "host")):
        with pytest.raises(wire.ProtocolError):
            wire.decode(wire.encode(FirstRoundFormed(names)), FROM_OWN_AGENT)


def test_a_folder_that_was_moved_has_two_names() -> None:
    with pytest.raises(wire.ProtocolError, match="at most 2 items"):
        wire.decode(wire.encode(FirstRoundFormed(("a", "b", "c"))), FROM_OWN_AGENT)


# Whose words they are.


def exit_on(host: str) -> WorkerExit:
    return WorkerExit(0, 0, host, 7, 1, stopped=False, time_s=0.0, duration_s=0.0)


def of(host: str) -> list[object]:
    """A record of each kind that names its host."""
    evidence, first = RankEvidence(rank=0, local_rank=0, host=host, pid=7), exit_on("first")
    return [
        Output(host, 0, 0, "stdout", 0),
        WorkerActivity(0, host=host),
        WorkersExamined(0, 0, (evidence,), NodeEvidence(host=host)),
        WorkersExamined(0, 0, (evidence,)),
        CollectivesSampled(0, 0, host),
        HardwareOfNode(attempt=0, host=host, hardware=NodeHardware()),
        SessionOpened(0, 0, 0, host, "here"),
        AttemptEnded(
            AttemptResult(0, "failed", (exit_on(host),), 1.0, cause=first), (WorkersExamined(0, 0, (evidence,)),)
        ),
    ]


@pytest.mark.parametrize(("said", "known"), [*zip(of("others"), of("gpu1"), strict=True)], ids=range(8))
def test_a_node_speaks_for_its_own_host(said: object, known: object) -> None:
    assert with_senders_host("gpu1", said) == known


def test_what_names_no_host_stays_as_it_is() -> None:
    of_another = ReportOfNode(1, (0, 1), WorkerActivity(0, host="gpu2"))
    for record in (Pong(), FaultInjected(0), of_another, object()):
        assert with_senders_host("gpu1", record) is record


def test_no_record_of_an_agent_names_its_host_unnoticed() -> None:
    named = {
        part
        for part in set().union(*map(dataclasses_in, (*FROM_AGENT, *features.records("FROM_AGENT"))))
        if "host" in part.__dataclass_fields__
    }
    # The launcher writes the host of a HealthFinding itself.
    seen = {Output, WorkerActivity, RankEvidence, NodeEvidence, CollectivesSampled, SessionOpened, WorkerExit}
    assert named == {*seen, HardwareOfNode, HealthFinding, SnapshotUsed, CheckpointSeen}


def test_a_report_that_names_ranks_is_compared_with_the_ranks_of_its_node() -> None:
    reports = [each for each in features.records("FROM_AGENT") if issubclass(each, Report)]
    fields = {each: {field.name for field in dataclasses.fields(each)} for each in reports}
    names_ranks = [each for each in reports if {"rank", "ranks"} & fields[each]]
    assert names_ranks
    assert [each.__name__ for each in names_ranks if not issubclass(each, OfRanks)] == []
