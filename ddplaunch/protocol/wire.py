"""Encodes and decodes the records that processes of a run exchange: one JSON object per line, dataclasses by name.

Used by every process of a run. The raw bytes of a ``Chunk`` follow its line. Input is not trusted: invalid input raises
ProtocolError, sizes are limited, and nothing is unpickled. Must not import a module of records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import marshal
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, BinaryIO, TypeVar, cast

from ddplaunch import features
from ddplaunch.protocol.field_types import Limit, between
from ddplaunch.text import cut

MAX_LINE_BYTES = 32 << 20
"""On Linux an environment and an argument list may each have 2 MiB, and JSON escapes take up to six times as much."""

MAX_CHUNK_BYTES = 8 << 20
"""Limit of the raw bytes after a record, and so of a line of output that is sent whole."""

T = TypeVar("T")
_Reader = Callable[[Any], Any]

_NO_CHARACTER = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udc7f\udd00-\udfff]")
"""Surrogates that are neither a pair, which JSON reads as one character, nor the escape of a byte (PEP 383)."""


_MAX_SHARED, _MAX_SHARED_BYTES = 1024, 64 << 10
"""Of records that are kept for the next one that is equal."""

_MAX_SHORT, _SHORT_CHARS = 32 << 10, 256
_MAX_TEXTS, _MAX_CHARS = 1024, 32 << 10
"""Of short texts, as names of hosts, and of others, as stacks: kept for the next one that is equal; 40 MB at most."""

_MARSHAL_VERSION = 2
"""Gives equal values of JSON equal bytes, as later versions do not, in a sixth of the time that JSON takes."""

_UNCHANGED = {int, float, bool, type(None)}


class ProtocolError(Exception):
    """The input is not a record that the reader accepts."""


_MISFITS = (ProtocolError, ValueError, TypeError, OverflowError, RecursionError)
"""What is raised for a value that does not fit its type."""


class CutOff(ProtocolError):
    """The stream ended within a record, for example because its writer was killed."""


ChunkSize = Annotated[int, between(0, MAX_CHUNK_BYTES)]


class Nested:
    """Base of the records of features that records of the core carry: their JSON has their name.

    ``direction``: of which ``features.records`` a field with this type may be.
    """

    direction: typing.ClassVar[str]


class Shared:
    """Base of the records that many ranks send alike: equal ones are decoded once, and become one object."""


class Chunk:
    """Base of the records that raw bytes follow, ``nbytes`` of them."""

    nbytes: ChunkSize


def encode(record: object) -> bytes:
    r"""The record as one line, which ``decode`` accepts whatever its texts are.

    Surrogate escapes (PEP 383: text that is not UTF-8) arrive unchanged; other lone surrogates as ``\ud83d``, six
    characters.
    """
    body = {"record": type(record).__name__, **to_json(record, has_defaults=False)}
    return json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"


def _no_types() -> tuple[type, ...]:
    return ()


def decode(line: bytes, allowed: tuple[type, ...], late: Callable[[], tuple[type, ...]] = _no_types) -> Any:
    """The record in ``line``.

    ``late`` returns more types that are allowed, and may import them: it is called only for a record that is none of
    ``allowed``.

    Raises:
        ProtocolError: not JSON, not one of ``allowed``, or a field missing, unknown, of another type or outside of its
            ``Limit``; but a text that is too long is cut.
    """
    try:
        body = json.loads(line)
        name = body.pop("record")
        return _build(_by_name(allowed).get(name) or _by_name(late())[name], body)
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
    except _MISFITS as error:
        raise ProtocolError(f"no {record_type.__name__}: {_excerpt(body)}") from error


def salvage(record_type: type[T], body: object) -> T | None:
    """The record of this type, as far as ``body`` is one; for files of other versions, and damaged ones.

    What has no field is passed over. A value that does not fit is as one that is missing; in a list it is left out.
    None if a field without a default is missing.
    """
    with contextlib.suppress(*_MISFITS):
        return cast("T", _build_of_what_fits(record_type, body))
    return None


def read_record(
    stream: BinaryIO,
    allowed: tuple[type, ...],
    late: Callable[[], tuple[type, ...]] = _no_types,
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
        record = decode(line, allowed, late)
    return record, _payload(stream, record.nbytes) if isinstance(record, Chunk) else b""


def _payload(stream: BinaryIO, nbytes: int) -> bytes:
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise CutOff("the stream ended within an output chunk")
    return data


def to_json(value: Any, *, has_defaults: bool = True) -> Any:
    """``value`` for JSON: dataclasses as objects, tuples and sets as lists, texts as ``encode`` describes.

    Without ``has_defaults``, fields that were left at their default are left out: the reader adds them.
    """
    if type(value) in _UNCHANGED:  # Most values are.
        return value
    if isinstance(value, str):
        return value if value.isascii() else _NO_CHARACTER.sub(lambda match: f"\\u{ord(match[0]):x}", value)
    if (fields := getattr(type(value), "__dataclass_fields__", None)) is not None:
        body = {
            name: each if type(each) in _UNCHANGED else to_json(each, has_defaults=has_defaults)
            for name, field in fields.items()
            if (each := getattr(value, name)) is not field.default or has_defaults
        }
        return {"record": type(value).__name__, **body} if isinstance(value, Nested) else body
    if isinstance(value, dict):
        return {to_json(key): to_json(item, has_defaults=has_defaults) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(map(to_json, value))
    if isinstance(value, (tuple, list)):
        return [to_json(item, has_defaults=has_defaults) for item in value]
    return value


def prepare(kind: Any) -> None:
    """Do now what the first record of type ``kind`` would do, in a process whose forks read such records."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        _readers(kind)
        for field_type in _field_types(kind).values():
            prepare(field_type)
    else:
        for part in typing.get_args(kind):
            prepare(part)


@functools.cache
def _by_name(record_types: tuple[type, ...]) -> dict[str, type]:
    return {cls.__name__: cls for cls in record_types}


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _readers(cls: type, *, salvages: bool = False) -> dict[str, _Reader]:
    return {name: _reader(kind, salvages=salvages) for name, kind in _field_types(cls).items()}


def _reader(kind: Any, *, salvages: bool = False) -> _Reader:
    """A function that makes the annotated type ``kind`` of what JSON has read; a ProtocolError if it does not fit.

    ``salvages``: records and lists within ``kind`` have what fits.
    """
    if isinstance(kind, type) and issubclass(kind, Shared) and not salvages:
        return functools.partial(_build_shared, kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return functools.partial(_build_of_what_fits if salvages else _build, kind)
    if isinstance(kind, type) and issubclass(kind, Nested):
        return functools.partial(_build_nested, kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return functools.reduce(_reader_within, args[1:], _reader(args[0], salvages=salvages))
    if origin in (typing.Union, types.UnionType):
        others = [_reader(arg, salvages=salvages) for arg in args if arg is not types.NoneType]
        return functools.partial(_first_fit, kind, others, types.NoneType in args)
    if origin is tuple:
        return _tuple_reader(args, salvages=salvages)
    if origin is frozenset:
        items = _tuple_reader((args[0], ...), salvages=salvages)
        return lambda value: frozenset(items(value))
    if origin is dict:
        read_key, read_value = map(_reader, args)
        return lambda value: {read_key(k): read_value(v) for k, v in _expect(dict, value).items()}
    if origin is typing.Literal:
        return functools.partial(_one_of, args)
    return {float: _float, str: _text}.get(kind) or functools.partial(_expect, kind)


def _build(cls: type, body: Any) -> Any:
    readers = _readers(cls)
    if not _expect(dict, body).keys() <= readers.keys():
        raise ProtocolError(f"{cls.__name__} has no {_excerpt(min(body.keys() - readers.keys()))}")
    return cls(**{name: readers[name](value) for name, value in body.items()})


def _build_shared(cls: type, body: Any) -> Any:
    key = marshal.dumps(body, _MARSHAL_VERSION)
    return _shared(cls, key) if len(key) <= _MAX_SHARED_BYTES else _build(cls, body)


@functools.lru_cache(_MAX_SHARED)
def _shared(cls: type, key: bytes) -> Any:
    return _build(cls, marshal.loads(key))


def _build_of_what_fits(cls: type, body: Any) -> Any:
    with contextlib.suppress(*_MISFITS):  # Most do, and a report has tens of thousands.
        return _build(cls, body)
    readers = _readers(cls, salvages=True)
    found = {}
    for name, value in _expect(dict, body).items():
        if name in readers:
            with contextlib.suppress(*_MISFITS):
                found[name] = readers[name](value)
    return cls(**found)


def _build_nested(base: type[Nested], body: Any) -> Any:
    name = _expect(dict, body).get("record")
    cls = _by_name(features.records(base.direction)).get(name)
    if cls is None or not issubclass(cls, base):
        raise ProtocolError(f"{_excerpt(name)} is no {base.__name__}")
    return _build(cls, {key: value for key, value in body.items() if key != "record"})


def _reader_within(read: _Reader, limit: Limit) -> _Reader:
    if limit.longest is not None:
        return _text_reader(limit, limit.longest)
    accepts = limit.accepts

    def read_within(value: Any) -> Any:
        value = read(value)
        if not accepts(value):
            raise ProtocolError(f"{_excerpt(value)} is not {limit.description}")
        return value

    return read_within


def _text_reader(limit: Limit, longest: int) -> _Reader:
    accepts = limit.accepts

    def read_text(value: Any) -> Any:
        # Most texts are short, and of ASCII.
        if type(value) is not str or len(value) > longest or not value.isascii():
            value = cut(_text(value), longest)
        if not accepts(value):
            raise ProtocolError(f"{_excerpt(value)} is not {limit.description}")
        length = len(value)
        return _short_once(value) if length <= _SHORT_CHARS else _once(value) if length <= _MAX_CHARS else value

    return read_text


@functools.lru_cache(_MAX_SHORT)
def _short_once(text: str) -> str:
    """The text that is kept already, of equal ones: those of many ranks. ``sys.intern`` of Python 3.12 frees none."""
    return text


@functools.lru_cache(_MAX_TEXTS)
def _once(text: str) -> str:
    return text


def _first_fit(kind: Any, readers: list[_Reader], has_none: bool, value: Any) -> Any:
    if value is None and has_none:
        return None
    for read in readers:
        try:
            return read(value)
        except ProtocolError:
            continue
    raise ProtocolError(f"{_excerpt(value)} fits none of {typing.get_args(kind)}")


def _tuple_reader(args: tuple[Any, ...], *, salvages: bool = False) -> _Reader:
    if args[-1] is Ellipsis:
        read_item = _reader(args[0], salvages=salvages)
        if salvages:
            return functools.partial(_fitting, read_item)
        return lambda value: tuple(map(read_item, _expect(list, value)))
    return functools.partial(_fixed, [_reader(arg) for arg in args])


def _fitting(read_item: _Reader, value: Any) -> tuple[Any, ...]:
    found = []
    for item in _expect(list, value):
        with contextlib.suppress(*_MISFITS):
            found.append(read_item(item))
    return tuple(found)


def _fixed(readers: list[_Reader], value: Any) -> Any:
    items = _expect(list, value)
    if len(items) != len(readers):
        raise ProtocolError(f"{len(items)} items instead of {len(readers)}")
    return tuple(read(item) for read, item in zip(readers, items, strict=True))


def _one_of(values: tuple[Any, ...], value: Any) -> Any:
    if type(value) not in (str, int) or value not in values:  # True is equal to 1.
        raise ProtocolError(f"{_excerpt(value)} is not one of {values}")
    return value


def _float(value: Any) -> float:
    return float(value) if type(value) is int else _expect(float, value)


def _text(value: Any) -> str:
    text: str = _expect(str, value)
    if not text.isascii():
        # Raises a ValueError for surrogates that stand for no byte and cannot be printed.
        text.encode("utf-8", "surrogateescape")
    return text


def _expect(kind: Any, value: Any) -> Any:
    # isinstance would accept a bool as an int.
    if type(value) is not kind:
        raise ProtocolError(f"{_excerpt(value)} is not {getattr(kind, '__name__', kind)}")
    return value


def _excerpt(value: Any) -> str:
    """``value`` for a message: escaped, and at most 80 characters of it."""
    return ascii(str(value)[:80])
