"""Reads dumps of torch's flight recorder, which a user's process wrote: ``_dump_fr_trace_json``, gloo and NCCL.

The recorder is a ring buffer of the last calls of collectives. Facts about torch 2.13 on which this module relies:

- A call of gloo stays in the state ``scheduled``; ``retired`` tells that it has finished. Gloo records neither send and
  recv nor monitored_barrier. Groups without a description have ``undefined``, and ``pg_config`` names no ranks.
- A call of NCCL is ``scheduled``, ``started`` (its kernel runs) or ``completed``. Sends and receives that were called
  as one batch stay ``scheduled``: the entry ``coalesced`` that follows them has their state.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplaunch.features.hangs import rank_list
from ddplaunch.features.hangs.records import (
    MAX_CALLS,
    MAX_GROUPS,
    Calls,
    CollectiveCall,
    FlightRecord,
    ProcessGroup,
)
from ddplaunch.protocol import wire
from ddplaunch.protocol.agent_entry import IMPORT_PACKAGE, PACKAGE_ROOT
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

if TYPE_CHECKING:
    from pathlib import Path

MAX_DUMP_BYTES = 32 << 20
"""An entry has some 450 bytes; torch keeps 2,000 entries unless the user wants more."""

FILE_S = 2.5
"""Time in which a file of torch is read. The agent must answer its launcher within 5 s."""

_FEW_BYTES, _MAX_VALUES = 4 << 20, 1 << 20
_MAX_MEMORY_BYTES = 1 << 30
_MAX_SIZES = 16
_MAX_NAME = 200
_MAX_NUMBER = 1 << 24
_MAX_TIME = 1 << 62
_COALESCED = "coalesced"
_SYNCHRONISES = re.compile("_?(all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier)", re.IGNORECASE)


def parse(dump: bytes, groups: Mapping[str, tuple[str, Sequence[int]]], raised_in: str | None = None) -> FlightRecord:
    """The end of the flight record in ``dump``: the newest calls, the unfinished ones, and the last one of each group.

    Arguments:
        dump: JSON as torch writes it.
        groups: description and global ranks of the process groups of the worker, by name.
        raised_in: of a worker that has ended by an exception, the name of the group whose newest call has raised it;
            empty: the newest call of all. It is unfinished, though gloo counts it as finished.

    Raises:
        ValueError: one sentence about a dump that is too large, cut off, or not a flight record.
    """
    with _only_value_errors():
        return _parsed(document(dump), groups, raised_in)


def parse_file(path: Path) -> FlightRecord:
    """The end of the flight record in a file that torch wrote when a collective had timed out: a pickle.

    A child process reads it, with limits: a small pickle can want gigabytes of memory, or hours. Blocks for up to
    ``FILE_S`` seconds.

    Raises:
        OSError: it is no regular file, or cannot be read; or no process can be started.
        ValueError: it is no flight record, or not read within the limits.
    """
    text = f"{IMPORT_PACKAGE}; from {__name__} import convert; convert()"
    command = [sys.executable, "-S", "-I", "-c", text, PACKAGE_ROOT]
    with kept_files.open_regular(path, os.O_NOFOLLOW) as file:
        try:
            read = subprocess.run(command, stdin=file, capture_output=True, check=True, timeout=FILE_S)
            record: FlightRecord = wire.decode(read.stdout, (FlightRecord,))
        except (subprocess.SubprocessError, wire.ProtocolError):
            raise ValueError(f"{path.name} is no flight record of torch, or too large") from None
    return record


def shortened(record: FlightRecord, count: int) -> FlightRecord:
    """With the newest ``count`` calls, and as many of the older ones that are unfinished or the last of their group."""
    kept = _kept(record.made.all, count)
    unfinished = [index for index, call in enumerate(record.made.all) if not call.is_done]
    times = [time_ns for index, time_ns in zip(unfinished, record.since_ns, strict=False) if index in kept]
    return replace(record, made=Calls(tuple(record.made.all[index] for index in kept)), since_ns=tuple(times))


def parse_times(dump: bytes, newest: int) -> dict[str, dict[int, int]]:
    """When the worker called collectives in which all ranks wait for each other; for ``slow_ranks``.

    Of each process group the time of each call by its number, in nanoseconds since the epoch; 0: unknown. Only the
    ``newest`` entries are read.

    Raises:
        ValueError: as ``parse``.
    """
    by_group: defaultdict[str, dict[int, int]] = defaultdict(dict)
    with _only_value_errors():
        for entry in _entries(document(dump))[-newest:]:
            operation = _text(entry["profiling_name"]).partition(":")[2]
            if entry.get("is_p2p", False) is not True and _SYNCHRONISES.match(operation):
                number = _integer(entry["collective_seq_id"], _MAX_NUMBER)
                created_ns = _integer(entry.get("time_created_ns") or 0, _MAX_TIME)
                by_group[_text(entry["process_group"][0])][number] = created_ns
    return dict(list(by_group.items())[:MAX_GROUPS])


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, texts, lists, tuples and dictionaries only: a user's process wrote the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it needs {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to another file")


def convert() -> None:
    """In the child: read a pickle from stdin, and write the end of its flight record to stdout, as a line.

    Whatever the pickle wants, this process alone has too little memory or time for it.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(FILE_S), math.ceil(FILE_S)))
    document = _PlainUnpickler(io.BytesIO(_limited(sys.stdin.buffer.read(MAX_DUMP_BYTES + 1)))).load()
    record = _parsed(document, _configured_groups(document.get("pg_config", {})))
    sys.stdout.buffer.write(wire.encode(record))


def _configured_groups(config: Mapping[str, Any]) -> dict[str, tuple[str, Sequence[int]]]:
    """Description and ranks by name, from the part ``pg_config`` of NCCL."""
    return {name: (_text(group["desc"]), json.loads(group["ranks"])) for name, group in config.items() if name}


def _parsed(
    document: dict[str, Any], groups: Mapping[str, tuple[str, Sequence[int]]], raised_in: str | None = None
) -> FlightRecord:
    entries = _entries(document)
    places: dict[str, int] = {}
    calls = _without_batches([_Called.of(entry, places) for entry in entries])
    kept = [calls[index] for index in _kept([each.call for each in calls], MAX_CALLS)]
    if raised_in is not None:
        kept = _with_failed_call(kept, places.get(raised_in, -1) if raised_in else None)
    is_complete = len(kept) == len(calls) and (not entries or entries[0]["record_id"] == 0)
    found = _groups(entries, groups, [list(places)[each.call.group] for each in kept])
    of_name = {name: place for place, name in enumerate(found)}
    made = (replace(each.call, group=of_name[list(places)[each.call.group]]) for each in kept)
    return FlightRecord(
        groups=tuple(found.values()),
        made=Calls(tuple(made)),
        since_ns=tuple(each.created_ns for each in kept if not each.call.is_done),
        is_complete=is_complete,
    )


@contextlib.contextmanager
def _only_value_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        text = quote(str(error), 100)
        raise ValueError(f"the flight record is too large, cut off or not one of torch: {text}") from error


def document(dump: bytes) -> Any:
    """The JSON that a worker has sent or left.

    Raises:
        ValueError: it is too large, or no JSON.
        RecursionError: it is nested too deeply.
    """
    if len(dump) > _FEW_BYTES and sum(map(dump.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES} values")  # They take 30 times the memory, and seconds.
    return json.loads(_limited(dump))


def _limited(dump: bytes) -> bytes:
    if len(dump) > MAX_DUMP_BYTES:
        raise ValueError(f"it has {len(dump)} bytes, at most {MAX_DUMP_BYTES} are read")
    return dump


def _entries(document: Any) -> list[dict[str, Any]]:
    entries = document.get("entries", [])
    if not isinstance(entries, list):
        raise TypeError("its entries are no list")
    return entries


class _Called(NamedTuple):
    """An entry: the call, whose group is a place in the order of the entries; its batch; when it was called."""

    call: CollectiveCall
    batch: tuple[Any, ...]
    created_ns: int

    @classmethod
    def of(cls, entry: dict[str, Any], places: dict[str, int]) -> _Called:
        """``places``: of the names of groups; a new one is added."""
        place = places.setdefault(_text(entry["process_group"][0]), len(places))
        return cls(_call(entry, place), _batch(entry), _integer(entry.get("time_created_ns") or 0, _MAX_TIME))


def _call(entry: dict[str, Any], group: int) -> CollectiveCall:
    backend, _, operation = _text(entry["profiling_name"]).partition(":")
    is_p2p = entry.get("is_p2p", False) is True
    number = entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or ()
    state = entry.get("state")
    return CollectiveCall(
        group=group,
        number=_integer(number, _MAX_NUMBER),
        operation=operation,
        backend=backend,
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        dtypes=tuple(_text(dtype) for dtype in dtypes[:_MAX_SIZES]),
        is_p2p=is_p2p,
        is_started=state == "started",
        is_done=entry.get("retired") is True or state == "completed",
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    return quote(value, _MAX_NAME)


def _integer(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"{type(value).__name__} in place of a number from 0 to {most}")
    return value


def _sizes(sizes: Any) -> tuple[tuple[int, ...], ...]:
    shapes = (shape[:_MAX_SIZES] for shape in (sizes or ())[:_MAX_SIZES])
    return tuple(tuple(_integer(length, _MAX_TIME) for length in shape) for shape in shapes)


def _batch(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What calls of one batch have in common."""
    return str(entry["process_group"][0]), entry.get("is_p2p"), entry.get("p2p_seq_id"), entry["collective_seq_id"]


def _without_batches(calls: Sequence[_Called]) -> list[_Called]:
    """The calls without the entries of batches; a call in a batch that has finished has finished too."""
    batches = {batch: call.is_done for call, batch, _ in calls if call.operation == _COALESCED}
    members = {batch for call, batch, _ in calls if call.operation != _COALESCED}
    return [
        each._replace(call=replace(each.call, is_done=True))
        if batches.get(each.batch) and not each.call.is_done
        else each
        for each in calls
        if each.call.operation != _COALESCED or each.batch not in members
    ]


def _with_failed_call(calls: list[_Called], group: int | None) -> list[_Called]:
    """The newest of ``group`` is unfinished, if no other is; None: the newest of all."""
    if not all(each.call.is_done for each in calls):
        return calls
    newest = next((each for each in reversed(calls) if group in (None, each.call.group)), None)
    return [each._replace(call=replace(each.call, is_done=False)) if each is newest else each for each in calls]


def _kept(calls: Sequence[CollectiveCall], count: int) -> list[int]:
    """The places of at most 2 * ``count`` calls, in their order."""
    newest = range(max(len(calls) - count, 0), len(calls))
    older = range(newest.start)
    unfinished = [index for index in older if not calls[index].is_done]
    last = {(calls[index].group, calls[index].is_p2p): index for index in range(len(calls))}
    others = dict.fromkeys([*unfinished, *(index for index in last.values() if index in older)])
    return sorted({*newest, *list(others)[:count]})


def _groups(
    entries: list[dict[str, Any]], known: Mapping[str, tuple[str, Sequence[int]]], first: Iterable[str]
) -> dict[str, ProcessGroup]:
    """Process groups by name, those with the names ``first`` before others."""
    described = {_text(entry["process_group"][0]): _text(entry["process_group"][1]) for entry in entries}
    names = dict.fromkeys([*first, *known])
    return {name: _group(name, *known.get(name, (described.get(name, ""), ()))) for name in list(names)[:MAX_GROUPS]}


def _group(name: str, description: str, ranks: Sequence[int]) -> ProcessGroup:
    shown = "" if description == "undefined" else quote(description, _MAX_NAME)
    known = ranks if len(ranks) <= rank_list.MAX_RANKS else ()
    members = rank_list.fold([_integer(rank, _MAX_NUMBER) for rank in known])
    return ProcessGroup(quote(name, _MAX_NAME), shown, members)
