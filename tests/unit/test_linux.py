"""What /proc shows of a process is what it was told to show, whether or not the kernel lets borders be moved."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.runs import environment

PROGRAM = """
import json, sys
from ddplaunch.system import linux
if "refused" in sys.argv:
    linux._move_borders = lambda *_: False
lines, env = json.load(sys.stdin)
for argv in lines:
    linux.set_command_line(argv, env)
sys.stdout.buffer.write(open("/proc/self/cmdline", "rb").read() + b"|" + open("/proc/self/environ", "rb").read())
"""


def shown(lines: list[list[str]], env: dict[str, str] | None = None, *arguments: str) -> tuple[bytes, bytes]:
    """The command line and the environment that /proc shows after ``lines`` were set one after the other."""
    command, given = [sys.executable, "-c", PROGRAM, *arguments], json.dumps([lines, env]).encode()
    done = subprocess.run(command, input=given, env={**environment(), "INITIAL": "1"}, capture_output=True, check=True)
    line, _, block = done.stdout.partition(b"|")
    return line, block


@pytest.mark.parametrize("argv", [["python", "-u", "train.py"], ["x" * 100_000, "", "\udcff\n"], ["a", ""]])
def test_the_command_line_is_exactly_this(argv: list[str]) -> None:
    line, block = shown([["before", "that"], argv])
    assert line == b"".join(argument.encode("utf-8", "surrogateescape") + b"\0" for argument in argv)
    assert b"INITIAL=1\0" in block


def test_the_environment_is_exactly_this() -> None:
    _, block = shown([["x"]], {"RANK": "3", "ODD": "a=b\udcff\n"})
    assert block == b"RANK=3\0ODD=a=b\xff\n\0"


def test_where_borders_cannot_be_moved_the_line_is_cut_and_padded() -> None:
    room = 3000
    short, _ = shown([["python", "train.py"]], None, "refused", "x" * room)
    assert short.rstrip(b"\0") == b"python\0train.py"
    assert len(short) > room
    long, block = shown([["y" * 2 * room]], {"RANK": "3"}, "refused", "x" * room)
    assert long.startswith(b"y" * room)
    assert long.endswith(b"y\0")
    assert len(long) < 2 * room
    assert b"INITIAL=1\0" in block
