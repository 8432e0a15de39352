"""Every record survives the wire, and whatever else comes over it is a ProtocolError and nothing worse."""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import json
import os
import signal
import types
import typing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch import features
from ddplaunch.features.hangs.records import Calls, CollectiveCall, FlightRecord
from ddplaunch.features.remote.arrivals import Arrivals
from ddplaunch.features.slow_ranks import records as collectives
from ddplaunch.protocol import field_types, launcher_agent, rendezvous, wire
from ddplaunch.protocol.field_types import Limit
from ddplaunch.protocol.launcher_agent import (
    FROM_AGENT,
    AttemptEnded,
    Notice,
    Output,
    PassSignal,
    StopWorkers,
)
from ddplaunch.protocol.rendezvous import NodeReady
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.protocol.specs import ForkserverSpec, ProcessSpec
from ddplaunch.protocol.wire import MAX_CHUNK_BYTES, Nested, ProtocolError, decode, encode, read_record
from tests.support import golden, texts

RECORDS: tuple[type, ...] = tuple(
    dict.fromkeys(
        record
        for module in (launcher_agent, rendezvous)
        for name, group in vars(module).items()
        if name.startswith(("FROM_", "TO_"))
        for record in group
    )
)
RECORDS += tuple(dict.fromkeys((*features.records("FROM_AGENT"), *features.records("TO_AGENT"))))

SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(texts.DECODED, max_size=8),
    int: st.integers(),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
}


def limit_of(kind: Any) -> Limit:
    return typing.get_args(kind)[1]


RUN_ID = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:@+-"
GAP = st.sampled_from(["-", "0", "999999999999999"])
LIMITED: dict[Limit, st.SearchStrategy[Any]] = {
    limit_of(field_types.OneLine): st.text(texts.PRINTABLE, max_size=8),
    limit_of(field_types.LongText): st.text(texts.DECODED, max_size=8),
    limit_of(field_types.RunId): st.text(RUN_ID, min_size=1, max_size=20).filter(lambda text: text[0] != "."),
    limit_of(field_types.Count): st.integers(0, 1 << 24),
    limit_of(field_types.Port): st.integers(0, 65535),
    limit_of(field_types.Size): st.integers(0, 1 << 60),
    limit_of(field_types.ReturnCode): st.integers(-64, 255),
    limit_of(field_types.Failure): st.integers(1, 255),
    limit_of(field_types.SignalNumber): st.sampled_from([int(signum) for signum in signal.Signals]),
    limit_of(collectives.Gaps): st.lists(GAP, min_size=1, max_size=3).map(",".join),
    limit_of(field_types.Seconds): st.floats(-(1 << 40), 1 << 40),
    limit_of(field_types.Quantity): st.floats(0, 1 << 60),
    limit_of(field_types.Pid): st.integers(0, 1 << 22),
    limit_of(field_types.Nanoseconds): st.integers(0, 1 << 62),
    limit_of(field_types.Limitless): st.integers(0, (1 << 63) - 1),
    limit_of(field_types.FolderName): st.sampled_from(["gpu1", "a b", "..x", "x" * 255]),
}
"""Values within each limit of a field."""


@functools.cache
def hints(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record, include_extras=True)


@functools.cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, as far as records use them."""
    if dataclasses.is_dataclass(kind):
        fields = {field.name: hints(kind)[field.name] for field in dataclasses.fields(kind)}
        return st.builds(kind, **{name: values(hint) for name, hint in fields.items()})
    if isinstance(kind, type) and issubclass(kind, Nested):
        return st.one_of([values(each) for each in features.records(kind.direction) if issubclass(each, kind)])
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(arg) for arg in args])
    if origin is typing.Annotated:
        if args[1] in LIMITED:
            return LIMITED[args[1]]
        return (st.integers(0, 100) if args[0] is int else values(args[0])).filter(args[1].accepts)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is frozenset:
        return st.frozensets(values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    return st.tuples(*map(values, args)) if origin is tuple else SIMPLE[kind]


ANY_RECORD = st.one_of([values(record) for record in RECORDS])
SHORT = st.text(texts.ENCODABLE, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | SHORT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=5,
)


def as_line(body: object) -> bytes:
    return json.dumps(body).encode() + b"\n"


@given(ANY_RECORD)
def test_a_record_survives_the_wire(record: Any) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    again = decode(line, RECORDS)
    assert again == record
    assert type(again) is type(record)


def test_a_field_that_was_left_at_its_default_is_in_files_but_not_on_the_wire() -> None:
    record = FlightRecord(since_ns=(1,))
    assert json.loads(encode(record)) == {"record": "FlightRecord", "since_ns": [1]}
    assert wire.to_json(record).keys() == hints(FlightRecord).keys()


def dataclasses_within(kind: Any) -> set[type]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {kind}.union(*map(dataclasses_within, hints(kind).values()))
    return set().union(*map(dataclasses_within, typing.get_args(kind)))


PARTS = sorted(set().union(*map(dataclasses_within, RECORDS)), key=lambda kind: kind.__name__)
"""All records, and the dataclasses that they consist of."""


def test_after_prepare_the_types_of_all_fields_are_known() -> None:
    wire._field_types.cache_clear()
    for kind in RECORDS:
        wire.prepare(kind)
    assert wire._field_types.cache_info().currsize == len(PARTS)


def test_a_text_that_is_not_utf8_survives() -> None:
    argument = os.fsdecode(b"\xff\x00\n\r\x1b[31m\xc3\xa9\xf0\x9f\x92\xa5\xed\xa0\x80")
    spec = ProcessSpec(tag="0", how="exec", argv=(argument,), env={argument: argument})
    again = decode(encode(spec), (ProcessSpec,))
    assert os.fsencode(again.argv[0]) == os.fsencode(argument)
    assert again.env == {argument: argument}


def test_what_an_environment_may_hold_fits_into_a_line() -> None:
    env = {f"NAME_{number}": "\udcff" * 100_000 for number in range(40)}
    line = encode(ProcessSpec(tag="0", how="exec", argv=(), env=env))
    assert len(line) < wire.MAX_LINE_BYTES
    assert decode(line, (ProcessSpec,)).env == env


def test_a_number_of_a_record_has_a_least_and_a_most() -> None:
    """A question is a kind of fields, and a value."""

    def is_accepted(question: str) -> bool:
        kind, _, value = question.partition(" ")
        return limit_of(getattr(field_types, kind)).accepts(ast.literal_eval(value))

    golden.check_answers("limits", is_accepted)


LIMITED_FIELDS = [
    (record, name, limit_of(kind))
    for record in PARTS
    for name, kind in hints(record).items()
    if typing.get_origin(kind) is typing.Annotated and kind.__origin__ in (int, float)
]


@given(st.sampled_from(LIMITED_FIELDS), st.sampled_from([-(10**400), 10**400, -1e300, 1e300, float("nan")]), st.data())
def test_a_number_beyond_the_limit_of_its_field_is_refused(
    limited: tuple[type, str, Limit], number: float, data: st.DataObject
) -> None:
    record, name, limit = limited
    assert not limit.accepts(number)
    body = {**json.loads(encode(data.draw(values(record)))), name: number}
    with pytest.raises(ProtocolError):
        decode(as_line(body), (record,))


EXIT = WorkerExit(3, 1, "gpu2", 9, 1, False, 0.0, 1.0, tail=("last",))


def test_an_attempt_has_no_more_exits_than_a_node_has_workers() -> None:
    record = AttemptEnded(AttemptResult(0, "failed", (EXIT,) * 4097, 0.0))
    with pytest.raises(ProtocolError):
        decode(encode(record), FROM_AGENT)


@pytest.mark.parametrize("host", ["a\nb", "\x1b]0;owned\x07", "\x9b31m", "\u202e", "\udcff"])
def test_a_name_that_could_steer_the_terminal_is_refused(host: str) -> None:
    with pytest.raises(ProtocolError, match="is not one line of printable text"):
        decode(encode(NodeReady(0, host, 1)), (NodeReady,))


@pytest.mark.parametrize("character", ["x", "é", "\udcff"])
def test_a_long_text_is_cut_and_says_so(character: str) -> None:
    longest = limit_of(field_types.LongText).longest or 0
    whole = Notice(character * longest)
    assert decode(encode(whole), (Notice,)) == whole
    cut = decode(encode(Notice(character * (longest + 1))), (Notice,)).text
    assert (len(cut), cut[:-6], cut[-6:]) == (longest, character * (longest - 6), "…[cut]")


@pytest.mark.parametrize("host", ["x" * 10_000, "é" * 10_000])
def test_a_long_name_costs_no_node(host: str) -> None:
    joined = decode(encode(NodeReady(0, host, 1)), (NodeReady,))
    assert (len(joined.host), joined.host[:1], joined.host[-6:]) == (4096, host[:1], "…[cut]")


@given(st.text(texts.ANY, max_size=8))
def test_the_reader_accepts_every_text_that_can_be_sent(text: str) -> None:
    spec = ProcessSpec(tag=text, how="exec", argv=(text,), env={text: text})
    again = decode(encode(spec), (ProcessSpec,))
    assert again.tag == again.argv[0] == again.env[again.tag]
    assert list(again.env) == [again.tag]
    assert decode(encode(again), (ProcessSpec,)) == again
    again.tag.encode("utf-8", "surrogateescape")


def test_a_surrogate_that_stands_for_nothing_becomes_its_escape() -> None:
    golden.check_answers("surrogates", lambda text: ascii(decode(encode(Notice(text)), (Notice,)).text))


# Garbage.


@given(st.binary())
def test_bytes_are_no_record(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(garbage, RECORDS)


@given(JSON)
def test_json_alone_is_no_record(body: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(as_line(body), RECORDS)


@given(ANY_RECORD, st.data())
def test_a_line_that_was_cut_off_is_no_record(record: Any, data: st.DataObject) -> None:
    line = encode(record)
    cut = data.draw(st.integers(1, len(line) - 1))
    with pytest.raises(ProtocolError):
        read_record(io.BytesIO(line[:cut]), RECORDS)


@given(
    st.lists(st.one_of(ANY_RECORD.filter(lambda each: not isinstance(each, wire.Chunk)), st.binary()), max_size=4),
    st.data(),
)
def test_records_that_arrive_in_pieces_are_those_of_the_stream(items: list[Any], data: st.DataObject) -> None:
    """Bytes stand for output, which follows a record that says how many they are."""
    header = functools.partial(Output, "node", 0, 0, "stdout")
    sent = [(header(len(item)), item) if isinstance(item, bytes) else (item, b"") for item in items]
    stream = b"".join(encode(record) + payload for record, payload in sent)
    arrivals, received = Arrivals(RECORDS), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        arrivals.add(stream[:size])
        stream = stream[size:]
        received += iter(arrivals.take, None)
    assert [(encode(record), payload) for record, payload in received] == [(encode(r), payload) for r, payload in sent]
    assert not arrivals.is_cut_off


def test_a_stream_that_ends_within_a_record_or_never_ends_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = Arrivals((Output,))
    arrivals.add(encode(Output("node", 0, 0, "stdout", 5)) + b"four")
    assert arrivals.take() is None
    assert arrivals.is_cut_off
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 100)
    endless = Arrivals((Output,))
    endless.add(b"x" * 100)
    assert endless.take() is None
    endless.add(b"x")
    with pytest.raises(ProtocolError):
        endless.take()


@given(ANY_RECORD, JSON, st.data())
def test_a_field_of_another_type_is_refused_or_harmless(record: Any, value: Any, data: st.DataObject) -> None:
    body = json.loads(encode(record))
    body[data.draw(st.sampled_from(sorted(body)))] = value
    try:
        again = decode(as_line(body), RECORDS)
    except ProtocolError:
        return
    # It fitted; a NaN among it is not equal to itself, so compare what is sent.
    assert decode(encode(again), RECORDS).__class__ is again.__class__


def test_a_line_is_a_record_or_refused_with_the_reason() -> None:
    def read(question: str) -> str:
        try:
            return str(decode(question.encode() + b"\n", (StopWorkers, PassSignal, ProcessSpec, ForkserverSpec)))
        except ProtocolError as error:
            return f"refused: {error}".partition(" of (")[0]

    golden.check_answers("wire", read)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"\n",
        b'{"record":' * 100_000 + b"\n",
        b'{"record": "PassSignal", "signum": ' + b"9" * 10_000 + b"}\n",
        b'{"record": "PassSignal", "signum": 1}{"record": "PassSignal", "signum": 1}\n',
        b'{"record": "PassSignal", "signum": 1, "signum": "x"}\n',
        b"\xff\xfe{}\n",
        b"null\n",
        b"\n",
        b"",
    ],
    ids=range(9),
)
def test_hostile_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line, RECORDS)


# Streams.


def test_the_end_of_the_stream_is_no_error() -> None:
    stream = io.BytesIO(encode(PassSignal(1)) + encode(PassSignal(2)))
    assert [read_record(stream, RECORDS) for _ in range(3)] == [(PassSignal(1), b""), (PassSignal(2), b""), None]


def test_output_comes_with_its_bytes_whatever_they_are() -> None:
    data = bytes(range(256)) + encode(PassSignal(1))
    stream = io.BytesIO(encode(Output("node", 0, 0, "stdout", len(data))) + data + encode(Notice("next")))
    assert read_record(stream, RECORDS) == (Output("node", 0, 0, "stdout", len(data)), data)
    assert read_record(stream, RECORDS) == (Notice("next"), b"")


@pytest.mark.parametrize("nbytes", [-1, 5, MAX_CHUNK_BYTES + 1, 1 << 62])
def test_output_of_an_impossible_length_is_refused_before_it_is_read(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=r"is not a number from 0 to|output chunk"):
        read_record(io.BytesIO(encode(Output("node", 0, 0, "stdout", nbytes)) + b"four"), RECORDS)


def test_a_line_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 1000)
    stream = io.BytesIO(encode(Notice("x" * 2000)))
    with pytest.raises(ProtocolError, match="over 1000 bytes"):
        read_record(stream, RECORDS)
    assert stream.tell() == 1000


# Files of other versions.


def test_of_a_damaged_record_what_fits_is_kept() -> None:
    whole = RunResult("job7", 1, "failed", 5.0, (AttemptResult(0, "failed", (EXIT,), 1.0),), EXIT)
    body = json.loads(json.dumps(wire.to_json(whole)))
    assert wire.salvage(RunResult, body) == whole
    damaged = {**body, "new": 1, "signal": [], "hosts": {}, "unkillable_pids": [1, "2", 3]}
    damaged["first_failure"] = {**body["first_failure"], "pid": -1}
    damaged["attempts"][0]["exits"] += [{**body["first_failure"], "tail": 7, "rank": 4}, {}, 3]
    damaged["attempts"] += [{}, None]
    exits = (EXIT, replace(EXIT, rank=4, tail=()))
    attempts = (AttemptResult(0, "failed", exits, 1.0),)
    assert wire.salvage(RunResult, damaged) == RunResult("job7", 1, "failed", 5.0, attempts, unkillable_pids=(1, 3))


@pytest.mark.parametrize("body", [None, [], {}, {"run_id": "a", "exit_code": 1, "outcome": "late", "duration_s": 1.0}])
def test_nothing_is_kept_of_a_record_without_what_it_needs(body: object) -> None:
    assert wire.salvage(RunResult, body) is None


def test_equal_texts_of_many_ranks_are_one_object() -> None:
    one, other = (decode(encode(replace(EXIT, rank=rank)), (WorkerExit,)) for rank in (3, 4))
    assert (one.host, one.tail) == ("gpu2", ("last",))
    assert (one.host is other.host, one.tail[0] is other.tail[0]) == (True, True)


def test_the_texts_of_a_long_run_do_not_pile_up() -> None:
    """``sys.intern`` of Python 3.12 frees no text."""
    for text, others in (("x" * 2000, 1100), ("host", 33_000)):
        first = decode(encode(replace(EXIT, tail=(text,))), (WorkerExit,)).tail[0]
        for number in range(others):
            decode(encode(replace(EXIT, tail=(text + str(number),))), (WorkerExit,))
        # A kept one would be the same object again.
        again = decode(encode(replace(EXIT, tail=(text,))), (WorkerExit,)).tail[0]
        assert again == first
        assert again is not first


def test_equal_records_of_many_ranks_become_one_object() -> None:
    made = Calls((CollectiveCall(group=0, number=1, operation="all_reduce", backend="nccl"),))
    one, other = (decode(encode(FlightRecord(made=made, since_ns=(ns,))), (FlightRecord,)) for ns in (1, 2))
    assert one.made == made
    assert one.made is other.made
