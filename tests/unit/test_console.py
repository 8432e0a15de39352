"""What the screen shows: whole lines with their owner in front, in whatever pieces they come, and how many it lost."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.display import console, line_prefix, stream_writer
from ddplaunch.launcher.display.console import Console
from tests.support import golden
from tests.support.consoles import STALL_S, Screens, end, out, read_all, screen, style


@pytest.fixture
def screens(tmp_path: Path) -> Iterator[Screens]:
    with contextlib.closing(Screens(tmp_path)) as screens:
        yield screens


ConsoleOn = Callable[[int, int], Console]


@pytest.fixture
def console_on() -> Iterator[ConsoleOn]:
    """Makes consoles; at the end their threads have ended, and their descriptors are closed."""
    with contextlib.ExitStack() as stack:

        def make(stdout_fd: int, stderr_fd: int) -> Console:
            console = Console(style(), stdout_fd, stderr_fd)
            stack.callback(end, console, *{stdout_fd, stderr_fd})
            return console

        yield make


def test_the_time_stands_before_lines_of_workers_and_messages(tmp_path: Path) -> None:
    screens = Screens(tmp_path, template="${time} [${host}:${rank}] ", one=True)
    shown = screens.shown((out(0), b"one\ntwo\n"), "ddplaunch: three")
    screens.close()
    clock = rb"\d\d:\d\d:\d\d\.\d{3} "
    lines = (rb"\[node1:0\] one", rb"\[node1:0\] two", rb"ddplaunch: three")
    assert re.fullmatch(b"".join(clock + line + b"\n" for line in lines), shown)


@pytest.fixture
def stuck_pipe(console_on: ConsoleOn) -> Iterator[tuple[int, Console]]:
    """A pipe that nobody reads yet, and a console that writes to it."""
    reader, writer = os.pipe()
    yield reader, console_on(writer, writer)
    os.close(reader)  # The console's thread may still hang in a write.


# Prefixes.


@pytest.mark.parametrize(("is_coloured", "cause"), [(False, b"cause"), (True, b"\x1b[1mcause\x1b[0m")])
def test_the_cause_of_a_failure_page_is_bold_on_a_terminal(is_coloured: bool, cause: bytes, tmp_path: Path) -> None:
    screens = Screens(tmp_path, one=True, colour={"stdout": False, "stderr": is_coloured})
    screens.console.show_page("== title ==\ncause\ndetails")
    assert screens.shown() == b"== title ==\n" + cause + b"\ndetails\n"
    screens.close()


# Lines and pieces of lines.


def test_pieces_of_lines_are_put_together_by_rank_and_stream(tmp_path: Path) -> None:
    golden.check_answers("console", lambda question: screen(tmp_path, question))


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b"\r", b"\xff"])).map(b"".join))
def test_prefixes_stand_behind_each_line_end_but_the_last_and_change_nothing_else(data: bytes) -> None:
    prefixed = line_prefix.prefixed(data, b"<>")
    assert prefixed.replace(b"<>", b"") == data
    ends = len(re.findall(rb"\r\n|\r|\n", data))
    assert prefixed.count(b"<>") == ends - data.endswith((b"\r", b"\n"))
    assert prefixed.count(b"<>") == len(re.findall(rb"(?:\r\n|\r|\n)<>", prefixed))


RUNS = (b"a\n", b"B\nC\n", b"d\n")
BOTH = (replace(out(0), runs=tuple(map(len, RUNS))), b"".join(RUNS))
"""Lines of stdout, of stderr, and of stdout again."""


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "stderr coloured"])
def test_lines_of_both_streams_of_a_rank_keep_their_order(tmp_path: Path, colour: bool) -> None:
    screens = Screens(tmp_path, one=True, colour={"stdout": False, "stderr": colour})
    shown = screens.shown((out(1), b"begun"), BOTH, (out(0, lost_lines=3), b""), BOTH)
    screens.close()
    lines = re.sub(rb"\x1b\[\d*m", b"", shown).decode().splitlines()
    four = ["[node1:0] a", "[node1:0] B", "[node1:0] C", "[node1:0] d"]
    assert lines[:5] == ["[node1:1] begun", *four]
    assert lines[5].startswith("... 3 lines not shown")
    assert lines[6:] == four


def test_what_cannot_be_shown_of_both_streams_is_counted_by_stream(stuck_pipe: tuple[int, Console]) -> None:
    stuck = stuck_pipe[1]._stdout
    stuck.output(out(1), b"x" * (1 << 20))
    stuck.output(*BOTH)
    texts = sorted(stuck.drop_queued())
    assert [text.split()[1] for text in texts if b"/0/" in text] == [b"2", b"2"]


# What cannot be shown.


def test_lines_that_the_agent_had_to_drop_are_said_where_they_are_missing(screens: Screens) -> None:
    shown = screens.shown((out(0), b"a"), (out(0, lost_lines=1204), b"b\n"), (out(1, lost_lines=2), b""))
    first, second = b"... 1,204 lines not shown, see /logs/0", b"... 2 lines not shown, see /logs/1"
    assert shown == b"[node1:0] a\n%b/stdout.log\n[node1:0] b\n%b/stdout.log\n" % (first, second)


def test_without_prefixes_lost_lines_are_said_on_stderr(screens: Screens) -> None:
    screens.console.show_no_prefix()
    assert screens.shown((out(0), b'{"a":'), (out(1), b"b\n"), (out(0, lost_lines=2), b" 1}\n")) == b'{"a":b\n 1}\n'
    assert screens.errors() == b"... 2 lines not shown, see /logs/0/stdout.log\n"


def test_short_pieces_do_not_fill_the_memory_either(
    stuck_pipe: tuple[int, Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_writer, "_QUEUE_BYTES", 1 << 20)
    _, shown = stuck_pipe
    shown.output(out(0), b"x" * (1 << 18) + b"\n")
    for _ in range(20_000):
        shown.output(out(0), b".\n")
    assert len(shown._stdout._queue) < 4000
    assert sum(header.lost_lines for header in shown._stdout._dropped.values()) > 16_000


def test_each_line_that_was_dropped_counts_once_and_the_newline_of_one_that_was_kept_does_not(
    stuck_pipe: tuple[int, Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shown = stuck_pipe
    shown.output(out(0), b"kept")
    monkeypatch.setattr(stream_writer, "_QUEUE_BYTES", -1)
    for piece in (b"\n1\n2\n3", b"...", b"...\n"):
        shown.output(replace(out(0), goes_on=True), piece)
    assert [header.lost_lines for header in shown._stdout._dropped.values()] == [3]


def test_the_end_does_not_wait_for_a_terminal_that_takes_nothing_at_all(
    stuck_pipe: tuple[int, Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_LAST_MESSAGES_S", 0.1)
    _, shown = stuck_pipe
    shown.output(out(0), b"x" * (1 << 18))
    shown.drain(lambda: False, 0.2)  # pytest's own timeout is the bound


def test_a_second_signal_ends_the_wait_for_a_stuck_terminal(console_on: ConsoleOn, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    shown = console_on(writer, os.open(tmp_path / "errors", os.O_WRONLY | os.O_CREAT))
    shown.output(out(0), b"x" * (1 << 18))
    asked = iter([False, False, True])
    shown.drain(lambda: next(asked), STALL_S)
    assert next(asked, None) is None, "it was asked each time"
    os.close(reader)


def test_a_stdout_on_a_full_disk_is_told_once_and_tried_again(
    screens: Screens, small_files: Callable[[int], None]
) -> None:
    screens.console.logs = "logs in /a"
    small_files(200)
    for _ in range(3):
        screens.output(out(0), b"x" * 300 + b"\n")
        assert screens.console._stdout.wait(STALL_S)
    small_files(resource.RLIM_INFINITY)
    shown = screens.shown((out(0), b"there is room again\n"))
    assert shown.endswith(b"... 3 lines not shown, see /logs/0/stdout.log\n[node1:0] there is room again\n")
    assert screens.errors() == b"ddplaunch: stdout cannot be written (File too large); the job goes on, logs in /a\n"


def test_lines_that_a_full_disk_lost_last_are_counted_on_stderr(
    screens: Screens, small_files: Callable[[int], None]
) -> None:
    small_files(200)
    screens.shown(*[(out(0), b"x" * 300 + b"\n" + b"y\n")] * 2)
    assert screens.errors().splitlines()[-1] == b"... 4 lines not shown, see /logs/0/stdout.log"


def test_a_descriptor_that_was_never_open_is_passed_over(tmp_path: Path) -> None:
    screen = tmp_path / "screen"
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.close(fd)
    shown = Console(style(), fd := os.open(screen, os.O_WRONLY | os.O_CREAT), writer)
    shown.show("to nobody")
    shown.output(out(0), b"line\n")
    end(shown, fd)
    assert screen.read_bytes() == b"[node1:0] line\n"


def test_a_terminal_somebody_made_non_blocking_gets_every_byte(stuck_pipe: tuple[int, Console]) -> None:
    reader, shown = stuck_pipe
    os.set_blocking(shown.stdout_fd, False)
    text = b"".join(b"%07d\n" % number for number in range(60_000))
    shown.output(out(0), text)
    shown.show("the end")
    data = read_all(reader, b"the end\n")
    assert data.replace(b"[node1:0] ", b"") == text + b"the end\n"


def test_what_a_debugger_shows_is_waited_for_while_messages_are_held_back(console_on: ConsoleOn) -> None:
    master, terminal = os.openpty()
    shown = console_on(terminal, terminal)
    shown.hold(is_held=True)
    shown.show("a message")
    shown.raw(b"the prompt")
    shown.wait_raw(STALL_S)
    os.set_blocking(master, False)
    assert os.read(master, 100) == b"the prompt"
    shown.hold(is_held=False)
    shown.wait_shown(STALL_S)
    assert os.read(master, 100) == b"a message\r\n"
    os.close(master)


def test_messages_that_are_not_utf8_are_escaped(screens: Screens) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        screens.shown("file \udcff")
    assert screens.errors() == b"file \\udcff\n"


def test_messages_and_progress_cannot_steer_the_terminal(screens: Screens) -> None:
    screens.shown("\x1b]0;owned\x07")
    screens.console.progress("\x1b]0;owned\x07")
    screens.console.drain(lambda: False, STALL_S)
    assert screens.errors().startswith(rb"\x1b]0;owned\x07" + b"\n" + rb"\x1b]0;owned\x07")
