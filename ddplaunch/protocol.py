"""Records on the wire: one JSON object per line, dataclasses of ``model`` by name; no pickle, sizes limited.

A line of an ``Output`` or a ``LogChunk`` is followed by its raw bytes. What does not fit is a ProtocolError, never a
crash or a huge allocation: both ends read with the limits below.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import Any, BinaryIO

from ddplaunch.logs import LogChunk
from ddplaunch.records import Output

MAX_LINE_BYTES = 32 << 20
"""An environment and an argument list may each be 2 MiB on Linux, and JSON escapes up to sixfold."""

MAX_CHUNK_BYTES = 8 << 20
"""Also the longest line that reaches the console in one piece."""


class ProtocolError(Exception):
    """What came over the wire is not a record the reader may get."""


class CutOff(ProtocolError):
    """The stream has ended inside a record, as when its writer is killed."""


def encode(record: object) -> bytes:
    """The record as one line. Text that is not UTF-8 (surrogate escapes) survives as JSON escapes."""
    body = {"record": type(record).__name__, **to_json(record)}
    return json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes, allowed: tuple[type, ...]) -> Any:
    """The record in ``line``.

    Raises:
        ProtocolError: not JSON, not one of ``allowed``, or a field missing, unknown or of another type.
    """
    try:
        body = json.loads(line)
        record_type = {cls.__name__: cls for cls in allowed}[body.pop("record")]
        return _build(record_type, body)
    except ProtocolError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a record: {line[:80]!r}") from error


def read_record(stream: BinaryIO, allowed: tuple[type, ...]) -> tuple[Any, bytes] | None:
    """Block for the next record and its bytes, if it has some; None at the end of the stream.

    Raises:
        ProtocolError: as ``decode``, or a limit is exceeded; CutOff if the stream ends inside a record.
    """
    line = stream.readline(MAX_LINE_BYTES)
    if not line:
        return None
    if not line.endswith(b"\n"):
        kind = CutOff if len(line) < MAX_LINE_BYTES else ProtocolError
        raise kind(f"cut off or over {MAX_LINE_BYTES} bytes: {line[:80]!r}")
    record = decode(line, allowed)
    return record, _payload(stream, record.nbytes) if isinstance(record, (Output, LogChunk)) else b""


def _payload(stream: BinaryIO, nbytes: int) -> bytes:
    if not 0 <= nbytes <= MAX_CHUNK_BYTES:
        raise ProtocolError(f"an output chunk of {nbytes} bytes")
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise CutOff("the stream ended inside an output chunk")
    return data


def to_json(value: Any) -> Any:
    """Dataclasses as objects, tuples and sets as lists."""
    if dataclasses.is_dataclass(value):
        return {name: to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return value


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(kind: Any, value: Any) -> Any:
    """``value``, read from JSON, as the annotated type ``kind``."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _build_union(args, value)
    if origin is tuple:
        return _build_tuple(args, _expect(list, value))
    if origin is frozenset:
        return frozenset(_build(args[0], item) for item in _expect(list, value))
    if origin is dict:
        return {_build(args[0], k): _build(args[1], v) for k, v in _expect(dict, value).items()}
    if origin is typing.Literal:
        if value not in args:
            raise ProtocolError(f"{_cut(value)} is not one of {args}")
        return value
    return float(value) if kind is float and type(value) is int else _expect(kind, value)


def _build_dataclass(cls: type, body: Any) -> Any:
    hints = _field_types(cls)
    unknown = _expect(dict, body).keys() - hints.keys()
    if unknown:
        raise ProtocolError(f"{cls.__name__} has no {_cut(min(unknown))}")
    return cls(**{name: _build(hints[name], value) for name, value in body.items()})


def _build_union(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return _build(kind, value)
        except ProtocolError:
            continue
    raise ProtocolError(f"{_cut(value)} fits none of {kinds}")


def _build_tuple(args: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else args
    if len(kinds) != len(items):
        raise ProtocolError(f"{len(items)} items instead of {len(kinds)}")
    return tuple(_build(kind, item) for kind, item in zip(kinds, items, strict=True))


def _expect(kind: Any, value: Any) -> Any:
    # bool is an int to isinstance; on the wire it is not.
    if type(value) is not kind:
        raise ProtocolError(f"{_cut(value)} is not {getattr(kind, '__name__', kind)}")
    if kind is str and not value.isascii():
        # JSON has surrogates that no bytes decode to, and that nobody could print: a ValueError.
        value.encode("utf-8", "surrogateescape")
    return value


def _cut(value: Any) -> str:
    """For a message: harmless to print, and no longer than a line."""
    return ascii(str(value)[:80])
