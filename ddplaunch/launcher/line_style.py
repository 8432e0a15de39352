"""How the workers' lines look on the console: what stands in front of each. Pure."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from ddplaunch.records import Output

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Style:
    """How lines look: ``template`` as torchrun's line prefix, with ``${host}`` as well; ``colour`` per stream."""

    role: str
    template: str
    colour: dict[str, bool]
    log_hint: Callable[[Output], str]

    def prefix(self, header: Output) -> bytes:
        """What stands in front of this worker's lines."""
        values = {
            "host": header.host,
            "role_name": self.role,
            "rank": str(header.rank),
            "local_rank": str(header.local_rank),
        }
        text = string.Template(self.template).safe_substitute(values)
        if text and self.colour[header.stream]:
            text = f"\x1b[{_COLOURS[header.rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode("utf-8", "surrogateescape")


def prefixed(data: bytes, prefix: bytes) -> bytes:
    """``prefix`` after every line end but one that ends ``data``."""
    if not prefix:
        return data
    body, end = data[:-1], data[-1:]
    if body.endswith(b"\r") and end == b"\n":
        body, end = body[:-1], b"\r\n"
    if body.count(b"\r") == body.count(b"\r\n"):
        return body.replace(b"\n", b"\n" + prefix) + end
    return _LINE_END.sub(lambda match: match[0] + prefix, body) + end
