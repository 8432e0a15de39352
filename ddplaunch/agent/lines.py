"""Cuts a byte stream into whole lines without looking at each. Pure but for the clock; used by the output pumps."""

from __future__ import annotations

import time

_QUIET_S = 0.1
_PATIENCE_S = 0.5


class LineBuffer:
    """Holds the unfinished last line of a stream, at most ``max_bytes`` of it.

    A carriage return ends a line as well: progress bars must show while they move. One at the very end of what was
    read may be half of CR LF, so it waits with its line.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._nbytes = 0
        self._since = 0.0
        self._last = 0.0

    def add(self, data: bytes) -> bytes:
        """The lines that ``data`` completes, as one piece; a line over the limit as if it had ended."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if not cut and self._nbytes + len(data) > self._max_bytes:
            cut = len(data)
        held = self.take_rest() if cut or self._was_returned(data) else b""
        self._keep(data[cut:])
        return held + data[:cut]

    def _was_returned(self, data: bytes) -> bool:
        """The held line ended in a carriage return that ``data`` does not make a CR LF."""
        return bool(self._parts) and self._parts[-1].endswith(b"\r") and not data.startswith(b"\n")

    def _keep(self, part: bytes) -> None:
        if not part:
            return
        self._last = time.monotonic()
        if not self._parts:
            self._since = self._last
        self._parts.append(part)
        self._nbytes += len(part)

    def deadline(self) -> float | None:
        """When the unfinished line is to be shown (``time.monotonic()``): it has been quiet, or growing for long.

        A long line in the making is quiet only where the machine is very busy. None without such a line.
        """
        return min(self._last + _QUIET_S, self._since + _PATIENCE_S) if self._parts else None

    def take_rest(self) -> bytes:
        """The unfinished line, which is then no longer held."""
        rest = b"".join(self._parts)
        self._parts, self._nbytes = [], 0
        return rest


def matching(lines: bytes, needles: tuple[bytes, ...], prefix: bytes) -> bytes:
    """Those of ``lines`` that hold one of ``needles``, each with ``prefix`` and one newline."""
    if not any(needle in lines for needle in needles):
        return b""
    found = [line for line in lines.splitlines() if any(needle in line for needle in needles)]
    return b"".join(prefix + line + b"\n" for line in found)


def count_lines(data: bytes) -> int:
    """How many lines ``data`` is to a reader who does not see it; part of one counts."""
    return max(1, data.count(b"\n")) if data else 0
