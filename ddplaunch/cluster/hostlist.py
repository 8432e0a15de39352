"""Number ranges in host names: ``expand`` turns ``gpu[01-03,07]`` into names, ``fold`` turns names into short text.

Used in launcher, agent and rendezvous. Pure. ``fold`` is the inverse of ``expand``: a user can paste the hosts of a
message into ``--hosts``.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_HOSTS = 100_000
"""More hosts than this are a typing mistake."""

MAX_NAME = 253
"""The longest DNS name."""

NAME = r"\[[^:\[\]]*:[^\[\]]*\]|(?:[^:\[\]]|\[[^:\[\]]*\])*"
"""Regular expression: an IPv6 address in brackets, or a name with number ranges. ``Host`` checks the characters."""


def expand(pattern: str) -> Iterable[str]:
    """The names in a text of form ``NAME``; the last range varies fastest.

    Raises:
        UsageError: invalid text in brackets, or too many names.
    """
    if ":" in pattern:
        return (pattern[1:-1],)
    pieces = re.split(r"\[([^\[\]]*)\]", pattern)
    if sum(map(len, pieces[::2])) + len(pieces) // 2 > MAX_NAME:
        raise UsageError(f"longer than a host name can be ({MAX_NAME} characters)")
    groups = [_ranges(piece) for piece in pieces[1::2]]
    # Counted before any name is built: 0-999999999 must not fill the memory.
    if math.prod(sum(len(numbers) for numbers, _ in group) for group in groups) > MAX_HOSTS:
        raise UsageError(f"means more than {MAX_HOSTS:,} hosts", "Is a range mistyped?")
    choices: list[tuple[str, ...]] = [(piece,) for piece in pieces]
    choices[1::2] = [tuple(str(n).zfill(width) for numbers, width in group for n in numbers) for group in groups]
    return map("".join, itertools.product(*choices))


def _ranges(text: str) -> tuple[tuple[range, int], ...]:
    """The text in one pair of brackets as ranges, each with the number of digits."""
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,15})(?:-([0-9]{1,15}))?\s*", part)
        if not match:
            raise UsageError("brackets hold an IPv6 address, or numbers and ranges like [1-4,7]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UsageError(f"[{first}-{last}] runs backwards")
        if len(last) < len(first) or (len(last) > len(first) and last[0] == "0"):
            raise UsageError(f"[{first}-{last}]: both ends must be padded with zeros to one length")
        ranges.append((range(int(first), int(last) + 1), len(first)))
    return tuple(ranges)


_HOST_OF = re.compile(r"((?:[^@]*@)?)([^:@,\[\]]+)((?::[0-9]+)?)")
_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,15})(?![0-9])")


def fold(names: Iterable[str]) -> str:
    """Many names as one short text in natural order: ``gpu[03-07,11],login``. ``parse_hosts`` accepts it.

    Args:
        names: hosts as ``str(host)`` or ``Host.name`` gives them; repeated names count once.

    Returns:
        Comma-separated text. Names with several numbers become one entry if all combinations occur, else more.
    """
    entries = sorted({_parts(name) for name in names}, key=_natural)
    # From right to left: the last numbers must be folded before names can differ in the first number only.
    for position in range(max(map(len, entries), default=0) // 2 * 2 - 1, 0, -2):
        entries = _merged(entries, position)
    return ",".join(map("".join, entries))


def _parts(name: str) -> tuple[str, ...]:
    """Split ``name`` into text, number, text and so on. ``fold`` may fold the numbers.

    A number in the user's name or in the port is part of a text.
    """
    match = _HOST_OF.fullmatch(name)
    if not match:
        # A second colon: an IPv6 address.
        return (f"[{name}]" if name.count(":") > 1 and "[" not in name else name,)
    first, *others = _NUMBER.split(match[2])
    parts = [match[1] + first, *others]
    parts[-1] += match[3]
    return tuple(parts)


def _natural(parts: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple((int(part) if position % 2 else 0, part) for position, part in enumerate(parts))


def _merged(entries: list[tuple[str, ...]], position: int) -> list[tuple[str, ...]]:
    """Merge entries that differ only in the number at ``position``."""
    by_rest: dict[tuple[str, ...], list[str]] = {}
    for parts in entries:
        if len(parts) > position:
            by_rest.setdefault((*parts[:position], "", *parts[position + 1 :]), []).append(parts[position])
        else:
            by_rest[parts] = []
    return [
        (*parts[:position], _in_brackets(numbers), *parts[position + 1 :]) if numbers else parts
        for parts, numbers in by_rest.items()
    ]


def _in_brackets(numbers: list[str]) -> str:
    runs: list[tuple[str, str]] = []
    for number in numbers:
        first, last = runs[-1] if runs else ("", "")
        if runs and number == str(int(last) + 1).zfill(len(first)):
            runs[-1] = (first, number)
        else:
            runs.append((number, number))
    inside = ",".join(first if first == last else f"{first}-{last}" for first, last in runs)
    return f"[{inside}]" if len(numbers) > 1 else inside
