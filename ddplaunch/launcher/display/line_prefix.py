"""The prefix of the workers' lines on the console: ``[host:rank]``, or the user's template, in the rank's colour.

Runs in the launcher, in the threads of the console. Pure.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.text import clock

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Style:
    """The appearance of console lines.

    Attributes:
        template: torchrun's line prefix template, which may also contain ``${host}`` and ``${time}``.
        colour: whether to colour the prefix, by stream.
        log_hint: the location of the log with a worker's lines, for a message.
    """

    role: str
    template: str
    colour: dict[str, bool]
    log_hint: Callable[[Output], str]

    @property
    def time(self) -> str:
        """The time of day, followed by a space, for a message of the launcher; empty if the template has no time."""
        return f"{clock(time.time())} " if "${time}" in self.template else ""

    def prefix(self, header: Output) -> bytes:
        """The prefix of a worker's lines. ``${time}`` is the moment of this call."""
        values = {
            "time": clock(time.time()),
            "host": header.host,
            "role_name": self.role,
            "rank": str(header.rank),
            "local_rank": str(header.local_rank),
        }
        text = string.Template(self.template).safe_substitute(values)
        if text and self.colour[header.stream]:
            text = f"\x1b[{colour_of(header.rank)}m{text}\x1b[0m"
        return text.encode("utf-8", "surrogateescape")


def colour_of(rank: int) -> int:
    """The colour of a rank's prefix: a number of ECMA-48's SGR."""
    return _COLOURS[rank % len(_COLOURS)]


def prefixed(data: bytes, prefix: bytes) -> bytes:
    """``data`` with ``prefix`` after every line end, except at the end of ``data``."""
    if not prefix:
        return data
    body, end = data[:-1], data[-1:]
    if body.endswith(b"\r") and end == b"\n":
        body, end = body[:-1], b"\r\n"
    if body.count(b"\r") == body.count(b"\r\n"):
        return body.replace(b"\n", b"\n" + prefix) + end
    return _LINE_END.sub(lambda match: match[0] + prefix, body) + end
