"""Colours of the prefixes in console.log, which has none: as on the console of the run.

Runs in the process that the user started. Pure.
"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING

from ddplaunch.launcher.display.line_prefix import colour_of

if TYPE_CHECKING:
    from collections.abc import Callable

_VALUES = {"rank": "[0-9]+", "local_rank": "[0-9]+", "time": "[0-9:.]+"}
_ANY = r"[^\s]*?"


def colouring(template: str) -> Callable[[bytes], bytes]:
    """A function that colours the prefixes of ``template`` in consecutive pieces of console.log.

    Without the rank in the template, the pieces stay as they are.
    """
    pattern = _pattern(template)
    is_at_start = True

    def colour(data: bytes) -> bytes:
        nonlocal is_at_start
        if not data or pattern is None:
            return data
        begin = 0 if is_at_start else data.find(b"\n") + 1 or len(data)
        is_at_start = data.endswith(b"\n")
        return data[:begin] + pattern.sub(_coloured, data[begin:])

    return colour


def _coloured(match: re.Match[bytes]) -> bytes:
    return b"\x1b[%dm%b\x1b[0m" % (colour_of(int(match["rank"])), match[0])


def _pattern(template: str) -> re.Pattern[bytes] | None:
    """Matches the prefix at the beginning of a line."""
    parts, end, has_rank = ["^"], 0, False
    for match in string.Template.pattern.finditer(template):
        name = match["named"] or match["braced"]
        value = _VALUES.get(name, _ANY) if name else re.escape("$")
        if name == "rank" and not has_rank:
            has_rank, value = True, f"(?P<rank>{_VALUES['rank']})"
        parts += [re.escape(template[end : match.start()]), value]
        end = match.end()
    text = "".join((*parts, re.escape(template[end:])))
    return re.compile(text.encode("utf-8", "surrogateescape"), re.MULTILINE) if has_rank else None
