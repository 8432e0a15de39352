"""What the tests of the console give it: headers of output, and a style."""

from __future__ import annotations

from typing import Any

from ddplaunch.launcher.display.line_prefix import Style
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
