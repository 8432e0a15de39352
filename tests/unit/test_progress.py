"""What takes long is told: on one line that is rewritten on a terminal, elsewhere in a line now and then."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.features.node_progress.launcher import NodeProgress
from ddplaunch.launcher.display import console
from ddplaunch.launcher.display.console import Console, Progress
from ddplaunch.launcher.display.line_prefix import Style
from ddplaunch.protocol.launcher_agent import AttemptStarted, Output
from ddplaunch.transport.handle import NodeFacts
from tests.support.fake_agents import participants_of

STALL_S = 10.0
STYLE = Style("", "[${host}:${rank}] ", {"stdout": False, "stderr": False}, lambda _: "")
ERASE = b"\r\x1b[K"


class Terminal:
    """A pseudo-terminal, and a console that has it as stdout and stderr."""

    def __init__(self) -> None:
        self.fd, self._other = pty.openpty()
        self.console = Console(STYLE, self._other, self._other)

    def shown(self) -> bytes:
        self.console.drain(lambda: False, STALL_S)
        return os.read(self.fd, 1 << 16).replace(b"\r\n", b"\n")

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._other)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is due."""
    for name in ("_REWRITE_S", "_FIRST_S", "_AGAIN_S"):
        monkeypatch.setattr(console, name, 0.0)


# The console.


def test_progress_is_rewritten_and_goes_when_there_is_something_to_say(terminal: Terminal) -> None:
    terminal.console.progress("1 of 2")
    assert terminal.shown() == b"1 of 2"
    terminal.console.progress("2 of 2")
    assert terminal.shown() == ERASE + b"2 of 2"
    terminal.console.show("ours")
    assert terminal.shown() == ERASE + b"ours\n"
    terminal.console.progress("again")
    assert terminal.shown() == b"again"
    terminal.console.output(Output("a", 0, 0, "stdout", 0), b"line\nhalf")
    assert terminal.shown() == ERASE + b"[a:0] line\n[a:0] half"
    terminal.console.progress("behind half a line")
    assert terminal.shown() == b"\nbehind half a line"
    terminal.console.progress("")
    terminal.console.show("end")
    assert terminal.shown() == ERASE + b"end\n"


def test_progress_that_has_not_changed_is_not_written_again(terminal: Terminal) -> None:
    terminal.console.progress("x")
    assert terminal.shown() == b"x"
    terminal.console.progress("x")
    terminal.console.drain(lambda: False, STALL_S)
    terminal.console.progress("y")
    assert terminal.shown() == ERASE + b"y"


def test_a_file_and_a_dumb_terminal_have_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "file", "wb") as file:
        assert not Console(STYLE, file.fileno(), file.fileno()).has_progress
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    assert not terminal.console.has_progress
    terminal.close()


# When.


def test_what_is_quick_is_not_told(terminal: Terminal) -> None:
    told = Progress(terminal.console, is_quiet=False)
    told.show(lambda: pytest.fail("too early"))
    told.end()
    terminal.console.show("end")
    assert terminal.shown() == b"end\n"


def test_without_a_terminal_it_is_told_in_lines(tmp_path: Path, at_once: None) -> None:
    with open(tmp_path / "file", "wb") as file:
        lines = Console(STYLE, file.fileno(), file.fileno())
        told = Progress(lines, is_quiet=False)
        for number in range(4):
            told.show(lambda number=number: f"{number} of 3")
        told.end()
        lines.drain(lambda: False, STALL_S)
    text = (tmp_path / "file").read_bytes()
    assert text == b"ddplaunch: 1 of 3\nddplaunch: 2 of 3\nddplaunch: 3 of 3\n"


def test_the_times_are_those_of_a_patient_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [100.0, 104.9, 105.0, 105.1, 114.9, 115.0, 124.9]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: times[0]))
    said: list[str] = []
    lines: Any = SimpleNamespace(has_progress=False, show=said.append)
    told = Progress(lines, is_quiet=False)
    while times:
        told.show(lambda: str(times[0]))
        del times[0]
    assert said == ["ddplaunch: 105.0", "ddplaunch: 115.0"]


def test_quiet_is_quiet(terminal: Terminal, at_once: None) -> None:
    told = Progress(terminal.console, is_quiet=True)
    assert told.show(lambda: pytest.fail("not wanted")) == float("inf")
    told.end()


# Who is missing.


def test_those_who_are_still_connected_to_are_named(terminal: Terminal, at_once: None) -> None:
    participants = participants_of((64, 64), *(f"gpu{n}" for n in range(1, 65)))
    nodes = participants.nodes
    messages: Any = SimpleNamespace(progress=Progress(terminal.console, is_quiet=False), show=None)
    connecting = NodeProgress(participants, messages)
    for _ in range(2):
        connecting.run_due(0.0)
    assert terminal.shown() == b"ddplaunch: connecting: 0 of 64 nodes, waiting for gpu[1-64]"
    for node in nodes.all[:60]:
        nodes.on_agent_connected(node, NodeFacts())
    connecting.run_due(0.0)
    assert terminal.shown() == ERASE + b"ddplaunch: connecting: 60 of 64 nodes, waiting for gpu[61-64]"
    for node in nodes.all[60:]:
        nodes.on_agent_connected(node, NodeFacts())
    assert connecting.run_due(0.0) == float("inf")
    assert terminal.shown() == ERASE


def test_a_start_that_has_waited_for_torch_is_told_once() -> None:
    participants, said = participants_of((2, 2), "gpu1", "gpu2"), list[str]()
    messages: Any = SimpleNamespace(progress=None, show=lambda text, _level: said.append(text))
    watch = NodeProgress(participants, messages)
    for index, import_s in ((0, 12.0), (1, 61.4)):
        assert not said
        watch.on_event(index, started(0, index, import_s))
    for index in range(2):
        watch.on_event(index, started(1, index, 61.4))
    assert said == ["the start waited 1 min 1 s for `import torch`, on gpu2: --check measures it"]


def started(attempt: int, node: int, import_s: float) -> AttemptStarted:
    return AttemptStarted(attempt, 2, (4711 + node,), node, 2, first_rank=node, import_s=import_s)


def test_a_narrow_terminal_gets_what_fits(terminal: Terminal, at_once: None) -> None:
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    told = Progress(terminal.console, is_quiet=False)
    for _ in range(2):
        told.show(lambda: "x" * 100)
    assert terminal.shown() == b"ddplaunch: xxxxxxxx"
