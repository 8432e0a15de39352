"""Records of a stream that arrives in pieces, for who must not wait for the rest of one.

Used by the launcher, where one thread reads from many agents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddplaunch.protocol import wire


class Arrivals:
    """The records of a stream that arrives in pieces; the same rules as for ``wire.read_record``, which blocks."""

    def __init__(self, allowed: tuple[type, ...], late: Callable[[], tuple[type, ...]] = tuple) -> None:
        self._allowed, self._late = allowed, late
        self._data = bytearray()
        self._searched = 0
        """So many bytes of the data hold no end of a line."""
        self._chunk: wire.Chunk | None = None
        """A record whose bytes have not all arrived."""

    def add(self, data: bytes) -> None:
        """More of the stream has arrived."""
        self._data += data

    @property
    def is_cut_off(self) -> bool:
        """Whether a record is incomplete, after ``take`` has returned None."""
        return bool(self._data or self._chunk)

    def take(self) -> tuple[Any, bytes] | None:
        """The next record and its bytes; None if it is not complete yet.

        Raises:
            ProtocolError: invalid input, as in ``decode``, or a limit is exceeded.
        """
        if self._chunk is None:
            line = self._line()
            record = wire.decode(line, self._allowed, self._late) if line else None
            if not isinstance(record, wire.Chunk):
                return (record, b"") if line else None
            self._chunk = record
        if len(self._data) < self._chunk.nbytes:
            return None
        chunk, self._chunk = self._chunk, None
        return chunk, self._cut(chunk.nbytes)

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._searched) + 1
        self._searched = len(self._data)
        if max(end, 0 if end else self._searched) > wire.MAX_LINE_BYTES:
            raise wire.ProtocolError(f"over {wire.MAX_LINE_BYTES} bytes: {bytes(self._data[:80])!r}")
        return self._cut(end)

    def _cut(self, nbytes: int) -> bytes:
        data = bytes(self._data[:nbytes])
        if nbytes:
            del self._data[:nbytes]
            self._searched = 0
        return data
