"""Types of fields of records whose values ``wire`` checks when it decodes a record.

Used in annotations only. Another process may be broken or hostile: what it sends must not steer the reader.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated, Any

from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import is_folder_name, is_run_id


@dataclass(frozen=True)
class Limit:
    """A condition on a value, in ``Annotated``; ``wire`` refuses a record with a value that is not accepted.

    Attributes:
        description: what the value must be, as ``a number from 0 to 9``.
        longest: of a text: a longer one is cut to so many characters, and its end says so. It is not refused: an
            honest process may have a long message.
    """

    description: str
    accepts: Callable[[Any], bool]
    longest: int | None = None


def between(least: int, most: int) -> Limit:
    """Accepts the numbers from ``least`` to ``most``."""
    return Limit(f"a number from {least} to {most}", lambda number: bool(least <= number <= most))


def at_most(count: int) -> Limit:
    """Accepts tuples of up to ``count`` items."""
    return Limit(f"at most {count} items", lambda items: len(items) <= count)


Count = Annotated[int, between(0, 1 << 24)]
"""A rank, or a number of workers, nodes or attempts: the reader may make a list of so many."""

Pid = Annotated[int, between(0, 1 << 22)]
"""Up to Linux's PID_MAX_LIMIT (proc_pid_max(5)); 0: no process."""

Pids = Annotated[tuple[Pid, ...], at_most(1 << 16)]
Descriptor = Annotated[int, between(0, 1 << 30)]
Port = Annotated[int, between(0, 65535)]
Size = Annotated[int, between(0, 1 << 60)]
"""Any number that is only shown, as one of bytes or lines."""

Limitless = Annotated[int, between(0, (1 << 63) - 1)]
"""A number with which others are compared, as ``sys.maxsize``."""

Nanoseconds = Annotated[int, between(0, 1 << 62)]
"""A time since the epoch."""

ReturnCode = Annotated[int, between(-64, 255)]
"""As in ``subprocess``: an exit code, or minus the number of a signal."""

ExitCode = Annotated[int, between(0, 255)]

Failure = Annotated[int, between(1, 255)]
"""The exit code of a failure."""

SignalNumber = Annotated[int, Limit("the number of a signal", set(signal.Signals).__contains__)]

Seconds = Annotated[float, between(-(1 << 40), 1 << 40)]
"""A time or duration: finite, and a date that Python can format (up to the year 36812)."""

MAX_QUANTITY = 1 << 60
Quantity = Annotated[float, between(0, MAX_QUANTITY)]
"""A measured value, such as a rate; finite."""

RunId = Annotated[str, Limit("a run id", is_run_id)]
"""Names a folder: it has no slash, and no dot at its begin."""

OneLine = Annotated[str, Limit("one line of printable text", str.isprintable, longest=4 << 10)]
"""A name, address or sentence that is shown: it cannot steer the terminal or forge a line."""

LongText = Annotated[str, Limit("a text", lambda _: True, longest=256 << 10)]
"""Lines of text, such as a message or a traceback; whoever shows it escapes it."""

FolderName = Annotated[str, Limit("the name of a folder", is_folder_name)]
"""One component of a path: it names nothing outside of the folder that it is in."""
