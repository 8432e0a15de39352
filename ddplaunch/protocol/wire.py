"""Encodes and decodes the records that processes of a run exchange: one JSON object per line, dataclasses by name.

Used by every process of a run. The raw bytes of a ``Chunk`` follow its line. Input is not trusted: invalid input raises
ProtocolError, sizes are limited, and nothing is unpickled. Must not import a module of records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import types
import typing
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.protocol.field_types import Limit

MAX_LINE_BYTES = 32 << 20
"""On Linux an environment and an argument list may each have 2 MiB, and JSON escapes take up to six times as much."""

MAX_CHUNK_BYTES = 8 << 20
"""Limit of the raw bytes after a record, and so of a line of output that is sent whole."""

T = TypeVar("T")

_NO_CHARACTER = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udc7f\udd00-\udfff]")
"""Surrogates that are neither a pair, which JSON reads as one character, nor the escape of a byte (PEP 383)."""


_UNCHANGED = {int, float, bool, type(None)}


class ProtocolError(Exception):
    """The input is not a record that the reader accepts."""


class CutOff(ProtocolError):
    """The stream ended within a record, for example because its writer was killed."""


class Chunk:
    """Base of the records that raw bytes follow, ``nbytes`` of them."""

    nbytes: int


def encode(record: object) -> bytes:
    r"""The record as one line, which ``decode`` accepts whatever its texts are.

    Surrogate escapes (PEP 383: text that is not UTF-8) arrive unchanged; other lone surrogates as ``\ud83d``, six
    characters.
    """
    body = {"record": type(record).__name__, **to_json(record)}
    return json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"


def _no_types() -> tuple[type, ...]:
    return ()


def decode(line: bytes, allowed: tuple[type, ...], rare: Callable[[], tuple[type, ...]] = _no_types) -> Any:
    """The record in ``line``. ``rare`` returns more types that are allowed: it is called only for other records.

    Raises:
        ProtocolError: not JSON, not one of ``allowed``, or a field missing, unknown, of another type or outside of its
            ``Limit``.
    """
    try:
        body = json.loads(line)
        name, types_by_name = body.pop("record"), {cls.__name__: cls for cls in allowed}
        record_type = types_by_name.get(name) or {cls.__name__: cls for cls in rare()}[name]
        return _build(record_type, body)
    except ProtocolError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a record: {line[:80]!r}") from error


def from_json(record_type: type[T], body: object) -> T:
    """The record of this type that ``to_json`` has made ``body`` of; for files.

    Raises:
        ProtocolError: as ``decode``.
    """
    try:
        return cast("T", _build(record_type, body))
    except ProtocolError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"no {record_type.__name__}: {_excerpt(body)}") from error


def read_record(
    stream: BinaryIO,
    allowed: tuple[type, ...],
    rare: Callable[[], tuple[type, ...]] = _no_types,
    decoding: Callable[[int], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[Any, bytes] | None:
    """Block for the next record and its bytes, if it has some; None at the end of the stream. Types as in ``decode``.

    A record of so many bytes is decoded inside of ``decoding``.

    Raises:
        ProtocolError: invalid input, as in ``decode``, or a limit is exceeded.
        CutOff: the stream ends within a record.
    """
    line = stream.readline(MAX_LINE_BYTES)
    if not line:
        return None
    if not line.endswith(b"\n"):
        kind = CutOff if len(line) < MAX_LINE_BYTES else ProtocolError
        raise kind(f"cut off or over {MAX_LINE_BYTES} bytes: {line[:80]!r}")
    with decoding(len(line)):
        record = decode(line, allowed, rare)
    return record, _payload(stream, record.nbytes) if isinstance(record, Chunk) else b""


def _payload(stream: BinaryIO, nbytes: int) -> bytes:
    if not 0 <= nbytes <= MAX_CHUNK_BYTES:
        raise ProtocolError(f"an output chunk of {nbytes} bytes")
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise CutOff("the stream ended within an output chunk")
    return data


def to_json(value: Any) -> Any:
    """``value`` for JSON: dataclasses as objects, tuples and sets as lists, texts as ``encode`` describes."""
    if type(value) in _UNCHANGED:  # Most values are.
        return value
    if isinstance(value, str):
        return value if value.isascii() else _NO_CHARACTER.sub(lambda match: f"\\u{ord(match[0]):x}", value)
    if (names := getattr(type(value), "__dataclass_fields__", None)) is not None:
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {to_json(key): to_json(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(map(to_json, value))
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def prepare(kind: Any) -> None:
    """Do now what the first record of type ``kind`` would do, in a process whose forks read such records."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        for field_type in _field_types(kind).values():
            prepare(field_type)
    else:
        for part in typing.get_args(kind):
            prepare(part)


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _build(kind: Any, value: Any) -> Any:
    """``value``, read from JSON, as the annotated type ``kind``; raises ProtocolError if it does not fit."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _within(args[1], _build(args[0], value))
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
            raise ProtocolError(f"{_excerpt(value)} is not one of {args}")
        return value
    return float(value) if kind is float and type(value) is int else _expect(kind, value)


def _build_dataclass(cls: type, body: Any) -> Any:
    hints = _field_types(cls)
    unknown = _expect(dict, body).keys() - hints.keys()
    if unknown:
        raise ProtocolError(f"{cls.__name__} has no {_excerpt(min(unknown))}")
    return cls(**{name: _build(hints[name], value) for name, value in body.items()})


def _build_union(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return _build(kind, value)
        except ProtocolError:
            continue
    raise ProtocolError(f"{_excerpt(value)} fits none of {kinds}")


def _build_tuple(args: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else args
    if len(kinds) != len(items):
        raise ProtocolError(f"{len(items)} items instead of {len(kinds)}")
    return tuple(_build(kind, item) for kind, item in zip(kinds, items, strict=True))


def _within(limit: Limit, value: Any) -> Any:
    if not limit.accepts(value):
        raise ProtocolError(f"{_excerpt(value)} is not {limit.description}")
    return value


def _expect(kind: Any, value: Any) -> Any:
    # isinstance would accept a bool as an int.
    if type(value) is not kind:
        raise ProtocolError(f"{_excerpt(value)} is not {getattr(kind, '__name__', kind)}")
    if kind is str and not value.isascii():
        # Raises a ValueError for surrogates that stand for no byte and cannot be printed.
        value.encode("utf-8", "surrogateescape")
    return value


def _excerpt(value: Any) -> str:
    """``value`` for a message: escaped, and at most 80 characters of it."""
    return ascii(str(value)[:80])
