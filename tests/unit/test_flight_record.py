"""The dump of torch's flight recorder is read, whatever it contains."""

from __future__ import annotations

import json
import pickle
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.hangs import flight_record
from ddplaunch.features.hangs.flight_record import parse, parse_file, parse_times
from ddplaunch.features.hangs.records import MAX_CALLS, CollectiveCall, FlightRecord
from ddplaunch.protocol.wire import decode, encode
from tests.support import golden
from tests.support.hangs import recorded

GROUPS = {"0": ("default_pg", (0, 1))}


def entry(number: int, name: str = "nccl:all_reduce", state: str = "completed", **fields: Any) -> dict[str, Any]:
    """An entry as torch writes it for NCCL."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[2, 3]],
        "is_p2p": False,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": [[2, 3]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "record_id": number - 1,
        "retired": state == "completed",
        "state": state,
        "time_created_ns": 1000 + number,
        "time_discovered_completed_ns": None,
        "time_discovered_started_ns": None,
        "timeout_ms": 600000,
        **fields,
    }


def dump(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": entries}).encode()


def p2p(number: int, name: str, state: str) -> dict[str, Any]:
    return entry(1, name, state, is_p2p=True, p2p_seq_id=number, collective_seq_id=7)


def shown(record: FlightRecord) -> str:
    """What was read: groups and calls."""
    groups = [f"group {group.name} {group.description!r} of ranks {group.ranks!r}" for group in record.groups]
    return "\n".join(
        [
            *groups,
            *(line(record, call) for call in record.made.all),
            *["older calls are missing"] * (not record.is_complete),
        ]
    )


def line(record: FlightRecord, call: CollectiveCall) -> str:
    state = "done" if call.is_done else "started" if call.is_started else "open"
    group = f"{record.group_name(call)}{' (peer to peer)' * call.is_p2p}"
    words = f"{call.backend} {call.operation} #{call.number} of group {group}"
    return f"{words}: {state}, {','.join(call.dtypes)} {call.input_sizes}"


def batch(state: str) -> bytes:
    calls = [p2p(1, "nccl:send 0->1", "scheduled"), p2p(1, "nccl:recv 0<-1", "scheduled")]
    return dump(*calls, p2p(1, "nccl:coalesced", state))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the process that reads a file may start late."""
    monkeypatch.setattr(flight_record, "FILE_S", 60.0)


def test_what_is_in_a_dump(tmp_path: Path, patient: None) -> None:
    gloo = recorded("sleep")[0].flight_record
    assert gloo
    assert gloo.since_ns[0] > 1e18
    states = (entry(1), entry(2, state="started"), entry(3, state="scheduled"))
    sent = (p2p(4, "nccl:send 0->1", "completed"), p2p(5, "nccl:recv 0<-1", "scheduled"))
    foreign = parse(dump(entry(1, "nccl:\x1b[31mx", process_group=["0", "a\nb"])), {})
    assert decode(encode(foreign), (FlightRecord,)) == foreign
    records = {
        "gloo": gloo,
        "NCCL": parse(dump(*states), GROUPS),
        "send and recv": parse(dump(*sent), GROUPS),
        "a batch that is done": parse(batch("completed"), GROUPS),
        "a batch that is not done": parse(batch("scheduled"), GROUPS),
        "the ring buffer has dropped calls": parse(dump(entry(9)), GROUPS),
        "a group without members or description": parse(dump(entry(1, process_group=["3", "undefined"])), {}),
        "foreign text cannot steer the terminal": foreign,
        "a file of the watchdog of NCCL": read(tmp_path, file(entry(1), entry(2, state="scheduled"))),
    }
    golden.check("flight_records", {name: shown(record) for name, record in records.items()})


def test_only_the_end_of_a_long_record_is_kept() -> None:
    old = entry(2, state="scheduled", process_group=["5", "undefined"])
    record = parse(dump(entry(1, process_group=["4", "undefined"]), old, *(entry(i) for i in range(3, 2001))), GROUPS)
    assert len(record.made.all) == MAX_CALLS + 2
    assert not record.is_complete
    assert [record.group_name(call) for call in record.made.all[:3]] == ["4", "5", "0"]
    assert record.made.all[-1].number == 2000
    assert decode(encode(record), (FlightRecord,)) == record


def test_many_unfinished_calls_stay_within_the_limits() -> None:
    record = parse(dump(*(entry(i, state="scheduled") for i in range(1, 1001))), GROUPS)
    assert [call.number for call in record.made.all] == [*range(1, 65), *range(937, 1001)]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"entries": 3}',
        b'{"entries": [3]}',
        b'{"entries": [{}]}',
        dump(entry(1))[:-40],
        dump(entry(-1)),
        dump(entry(1, time_created_ns="now")),
        dump(entry(1, profiling_name=None)),
        dump(entry(1, process_group=[])),
        b"[" * 100_000,
        b"[" + b"[]," * 2_000_000 + b"[]]",
        b"[" + b"0," * 4_000_000 + b"0]",
    ],
    ids=range(14),
)
def test_a_malformed_dump(text: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"^the flight record is too large, cut off or not one of torch: .+"):
        parse(text, GROUPS)
    with pytest.raises(ValueError, match=r"^the flight record is "):
        parse_times(text, 9)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kB"


@pytest.mark.parametrize("sizes", [[3], [["x"]]], ids=range(2))
def test_malformed_sizes(sizes: list[object]) -> None:
    """Times do not depend on them."""
    with pytest.raises(ValueError, match=r"^the flight record is too large, cut off or not one of torch: .+"):
        parse(dump(entry(1, input_sizes=sizes)), GROUPS)
    assert parse_times(dump(entry(1, input_sizes=sizes)), 9) == {"0": {1: 1001}}


def test_a_huge_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_record, "MAX_DUMP_BYTES", 100)
    with pytest.raises(ValueError, match="bytes, at most 100 are read"):
        parse(dump(entry(1)), GROUPS)


def file(*entries: dict[str, Any]) -> bytes:
    """A file as torch's watchdog of NCCL writes it."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    frames = [{"name": "step", "filename": "train.py", "line": 7}]
    return pickle.dumps({"pg_config": config, "entries": [{**each, "frames": frames} for each in entries]}, protocol=2)


def shared(kind: type) -> object:
    """Small, but as a text larger than any memory; a tuple's hash takes as long."""
    value: object = kind()
    for _ in range(64):
        value = kind((value, value))
    return value


def read(folder: Path, data: bytes) -> FlightRecord:
    (folder / "file").write_bytes(data)
    return parse_file(folder / "file")


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(print),
        pickle.dumps({"entries": [Exception("x")]}),
        b"\x80\x02c__builtin__\neval\n(X\x03\x00\x00\x001+1tR.",
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x04\x95\xff",
        b"\x80\x02}b.",
        b"P1\n.",
        b"",
        file(entry(1))[:-20],
        b"\x80\x05\x96\x00\x00\x00\x00\x02\x00\x00\x00x.",
        file(entry(1, time_created_ns=shared(tuple))),
        file(entry(1, time_created_ns=shared(list))),
        file(entry(1, p2p_seq_id=shared(tuple))),
        b"(" * 6_000_000 + b"." * 9,
        b"]" * 6_000_000 + b"a" * 5_999_999 + b".",
    ],
    ids=range(15),
)
def test_a_file_that_is_no_flight_record_does_nothing(tmp_path: Path, data: bytes) -> None:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"^file is no flight record of torch, or too large$"):
        read(tmp_path, data)
    assert time.monotonic() - began < 2 * flight_record.FILE_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kB, of this process"


def test_the_process_that_reads_a_file_gets_no_more_memory_than_its_limit(tmp_path: Path) -> None:
    """Without a limit it takes 2 GB for this file: a table up to the number under which the value is kept."""
    before_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # Of the children of earlier tests, too.
    with pytest.raises(ValueError, match="or too large"):
        read(tmp_path, b"\x80\x02Nr\xff\xff\xff\x07.")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before_kb, 1 << 20)


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path, patient: None) -> None:
    assert read(tmp_path, file(entry(1))).made.all
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        parse_file(tmp_path / "link")


def test_the_call_that_has_failed_is_unfinished() -> None:
    """gloo has counted it as finished."""
    called = dump(entry(1), entry(1, process_group=["1", "tp"], time_created_ns=5), entry(2))
    for group, open_call, since_ns in (("", ("0", 2), 1002), ("1", ("1", 1), 5)):
        failed = parse(called, GROUPS, group)
        assert [(failed.group_name(call), call.number) for call in failed.made.unfinished] == [open_call]
        assert failed.since_ns == (since_ns,)
    assert not parse(called, GROUPS, "unknown").made.unfinished
    waiting = dump(entry(1, state="scheduled"), entry(2))
    assert parse(waiting, GROUPS, "") == parse(waiting, GROUPS)
    assert parse(dump(), GROUPS, "") == parse(dump(), GROUPS)


def test_an_empty_record() -> None:
    assert parse(b"{}", {}) == FlightRecord()


def test_times_of_calls_that_synchronise() -> None:
    calls = [
        entry(1),
        entry(2, "nccl:broadcast"),
        p2p(3, "nccl:send 0->1", "completed"),
        entry(4, "nccl:_all_gather_base"),
    ]
    assert parse_times(dump(*calls), 9) == {"0": {1: 1001, 4: 1004}}
    assert parse_times(dump(*calls), 2) == {"0": {4: 1004}}
