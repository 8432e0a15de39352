"""What the tests of the console give it: headers of output, and a style."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddplaunch.launcher.display.console import Console
from ddplaunch.launcher.display.line_prefix import Style
from ddplaunch.launcher.watches import Watch
from ddplaunch.protocol.launcher_agent import Output

STALL_S = 10.0
"""A console that shows nothing for so long has stopped."""


def style(**fields: Any) -> Style:
    defaults: dict[str, Any] = {
        "role": "trainer",
        "template": "[${host}:${rank}] ",
        "colour": {"stdout": False, "stderr": False},
        "log_hint": lambda header: f"/logs/{header.local_rank}/{header.stream}.log",
    }
    return Style(**{**defaults, **fields})


def out(rank: int, lost_lines: int = 0) -> Output:
    return Output("node1", rank, rank, "stdout", 0, lost_lines)


def err(rank: int) -> Output:
    return Output("node1", rank, rank, "stderr", 0)


class Screens:
    """A console whose stdout and stderr are two files, or one."""

    def __init__(self, folder: Path, one: bool = False, **fields: Any) -> None:
        self._paths = [folder / "screen", folder / ("screen" if one else "other")]
        self._fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC) for path in self._paths]
        self.console = Console(style(**fields), *self._fds)
        self.output = self.console.output

    def shown(self, *pieces: tuple[Output, bytes] | str) -> bytes:
        """What stdout's screen holds after these pieces; a text is a message of ours."""
        for piece in pieces:
            if isinstance(piece, str):
                self.console.show(piece)
            else:
                self.output(*piece)
        self.console.drain(lambda: False, STALL_S)
        return self._paths[0].read_bytes()

    def errors(self) -> bytes:
        return self._paths[1].read_bytes()

    def close(self) -> None:
        end(self.console, *self._fds)


def end(console: Console, *fds: int) -> None:
    """End the threads of a console, once they have written all or cannot, and close ``fds``."""
    console.drain(lambda: False, STALL_S)
    console.close()
    for fd in fds:
        os.close(fd)


def screen(folder: Path, question: str, watch: Callable[[Console], Watch] | None = None) -> str:
    """What a question's pieces show on one screen or two: of stdout of a rank, of stderr (``e``), or our words."""
    number, *pieces = question.split(" | ")
    with contextlib.closing(Screens(folder, one=number == "one")) as screens:
        if watch:
            screens.output = watch(screens.console).on_output(screens.output)
        shown = [screens.shown(*map(_piece, pieces)), *([screens.errors()] if number == "two" else [])]
    return " and ".join(ascii(each.decode("latin-1")) for each in shown)


def _piece(text: str) -> tuple[Output, bytes] | str:
    who, _, words = text.partition(":")
    header = err(int(who[1:])) if who.startswith("e") else out(int(who)) if who != "us" else None
    return (header, words.encode("latin-1")) if header else words


def read_all(fd: int, until: bytes) -> bytes:
    """Read until ``until`` was seen."""
    data = bytearray()
    while until not in data[-len(until) - (1 << 16) :]:
        data += os.read(fd, 1 << 16)
    return bytes(data)
