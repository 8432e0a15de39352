"""What a script can ask of ddplaunch by a line in a file, or by an exit code: no restart, or a restart elsewhere.

Written by the worker, read by the agent once the worker has ended. Pure. A script in any language can write the file.
"""

from __future__ import annotations

from typing import Literal

from ddplaunch.errors import GAVE_UP, HARDWARE
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import quote

VARIABLE = "DDPLAUNCH_REQUEST_FILE"
FILE = "request.txt"
"""Name of the file in the worker's folder."""

MAX_BYTES = 64 << 10
MAX_REASON_CHARS = 500

RequestKind = Literal["give_up", "avoid_this_node"]

EXIT_CODES: dict[RequestKind, int] = {"give_up": GAVE_UP, "avoid_this_node": HARDWARE}
"""The exit code of a worker that has called the function of this name."""

_NO_REASON = "no reason given"


@dataclass(frozen=True)
class Request:
    """What a worker has asked for; empty texts if for nothing.

    Attributes:
        give_up: why no restart may follow.
        avoid_node: why no further attempt may use the worker's node.
        unknown: the first line of the file that is none of the two.
    """

    give_up: str = ""
    avoid_node: str = ""
    unknown: str = ""


def line(kind: RequestKind, reason: str) -> str:
    """The line of the file, with its end: ``give_up: reason``."""
    return f"{kind}: {_one_line(reason)}\n"


def read(text: str, returncode: int) -> Request:
    """The request in the file's ``text`` and the exit code of a worker that has failed.

    Of several lines of a kind the first counts. Blank lines, and those that begin with ``#``, are ignored.
    """
    found: dict[str, str] = {}
    for row in text.split("\n"):
        kind, _, reason = row.partition(":")
        is_known = kind.strip() in EXIT_CODES
        if row.strip() and not row.startswith("#"):
            found.setdefault(kind.strip() if is_known else "", _one_line(reason) if is_known else _one_line(row))
    if returncode == GAVE_UP:
        found.setdefault("give_up", f"exit code {GAVE_UP}")
    return Request(found.get("give_up", ""), found.get("avoid_this_node", ""), found.get("", ""))


def _one_line(reason: str) -> str:
    return quote(" ".join(reason.split()), MAX_REASON_CHARS) or _NO_REASON
