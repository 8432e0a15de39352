"""Groups of numbers in host names: ``gpu[01-03,07]`` -> its names, and many names -> their shortest text. Pure.

One is the other's inverse: what ``fold`` wrote into an error table can be pasted into ``--hosts``.
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
"""Beyond this a range was mistyped."""

MAX_NAME = 253
"""The longest DNS name."""

NAME = r"\[[^:\[\]]*:[^\[\]]*\]|(?:[^:\[\]]|\[[^:\[\]]*\])*"
"""An IPv6 address in brackets, or a name with groups of numbers; which characters a name may have, ``Host`` knows."""


def expand(pattern: str) -> Iterable[str]:
    """The names that ``NAME`` with its groups of numbers stands for, the last group counting fastest.

    Raises:
        UsageError: a group that is not numbers and ranges, or too many names.
    """
    if ":" in pattern:
        return (pattern[1:-1],)
    pieces = re.split(r"\[([^\[\]]*)\]", pattern)
    if sum(map(len, pieces[::2])) + len(pieces) // 2 > MAX_NAME:
        raise UsageError(f"longer than a host name can be ({MAX_NAME} characters)")
    groups = [_ranges(piece) for piece in pieces[1::2]]
    # Counted before any name is made: 0-999999999 must not fill the memory.
    if math.prod(sum(len(numbers) for numbers, _ in group) for group in groups) > MAX_HOSTS:
        raise UsageError(f"stands for more than {MAX_HOSTS:,} hosts", "Is a range mistyped?")
    choices: list[tuple[str, ...]] = [(piece,) for piece in pieces]
    choices[1::2] = [tuple(str(n).zfill(width) for numbers, width in group for n in numbers) for group in groups]
    return map("".join, itertools.product(*choices))


def _ranges(text: str) -> tuple[tuple[range, int], ...]:
    """What is in one pair of brackets, as numbers with their width."""
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
    """Many names as one short text in natural order: ``gpu[03-07,11],login``. ``parse_hosts`` reads it back.

    Takes hosts in any writing that ``str(host)`` or ``Host.name`` has; each is named once. Folds several numbers in a
    name where all combinations are there, else leaves more than one text.
    """
    entries = sorted({_parts(name) for name in names}, key=_natural)
    # From the right, so that a[1-2] of two nodes is one text by the time the node's number is looked at.
    for place in range(max(map(len, entries), default=0) // 2 * 2 - 1, 0, -2):
        entries = _merged(entries, place)
    return ",".join(map("".join, entries))


def _parts(name: str) -> tuple[str, ...]:
    """Text, number, text, ...: what may be folded is at the odd places. User and port are never folded."""
    match = _HOST_OF.fullmatch(name)
    if not match:
        # A second colon: an IPv6 address.
        return (f"[{name}]" if name.count(":") > 1 and "[" not in name else name,)
    first, *others = _NUMBER.split(match[2])
    parts = [match[1] + first, *others]
    parts[-1] += match[3]
    return tuple(parts)


def _natural(parts: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple((int(part) if place % 2 else 0, part) for place, part in enumerate(parts))


def _merged(entries: list[tuple[str, ...]], place: int) -> list[tuple[str, ...]]:
    """Entries that differ in nothing but the number at this place become one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for parts in entries:
        if len(parts) > place:
            alike.setdefault((*parts[:place], "", *parts[place + 1 :]), []).append(parts[place])
        else:
            alike[parts] = []
    return [
        (*parts[:place], _in_brackets(numbers), *parts[place + 1 :]) if numbers else parts
        for parts, numbers in alike.items()
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
