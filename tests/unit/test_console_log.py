"""console.log has what the console shows, plain, whatever happens to the terminal or to the disk."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch.launcher.display import console_log, stream_writer
from ddplaunch.launcher.display.console import Console
from ddplaunch.system.files import kept_files
from tests.support.consoles import STALL_S, err, out, style
from tests.support.processes import wait_until

COLOURS = {"stdout": True, "stderr": True}
FULL = "ddplaunch: console.log cannot be written (No space left on device); the job goes on\n"


class Logged:
    """A console on the file ``screen`` that keeps a log in the same folder."""

    def __init__(self, folder: Path, *, template: str = "[${rank}] ", reports_full_disk: bool = True) -> None:
        self.screen, self.file = folder / "screen", folder / console_log.FILE
        self.fd = os.open(self.screen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.console = Console(style(template=template, colour=COLOURS), self.fd, self.fd)
        self.console.keep_log(folder, reports_full_disk=reports_full_disk)

    def log(self) -> bytes:
        self.console.drain(lambda: False, STALL_S)
        return self.file.read_bytes()


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    logged = Logged(tmp_path)
    with contextlib.closing(logged.console):
        yield logged
    os.close(logged.fd)


def test_it_has_the_lines_and_messages_of_both_streams_without_colours(logged: Logged) -> None:
    logged.console.output(out(0), b"a\x1b[31m\xff\nb\n")
    logged.console.show("ddplaunch: three\x1b[2J")
    logged.console.output(err(1), b"c\n")
    logged.console.show_page("title\ncause\nend")
    logged.console.note("ddplaunch: error: no host\x07")
    three, noted = b"ddplaunch: three\\x1b[2J\n", b"ddplaunch: error: no host\\x07\n"
    assert logged.log() == b"[0] a\x1b[31m\xff\n[0] b\n" + three + b"[1] c\ntitle\ncause\nend\n" + noted
    assert b"\x1b[36m[0] \x1b[0ma\x1b[31m" in logged.screen.read_bytes()
    assert b"\x1b[1mcause" in logged.screen.read_bytes()
    assert b"no host" not in logged.screen.read_bytes(), "the command prints it itself"
    assert logged.file.stat().st_mode & 0o777 == 0o600


def test_times_are_there_if_the_console_has_them(tmp_path: Path) -> None:
    logged = Logged(tmp_path, template="${time} [${rank}] ")
    logged.console.output(out(0), b"one\n")
    logged.console.show("ddplaunch: two")
    assert re.fullmatch(rb"[\d:.]{12} \[0\] one\n[\d:.]{12} ddplaunch: two\n", logged.log())


def test_a_terminal_that_takes_nothing_does_not_hold_it_up(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    shown = Console(style(template="[${rank}] "), writer, writer)
    shown.keep_log(tmp_path, reports_full_disk=True)
    shown.output(out(0), b"x" * (1 << 18) + b"\n")
    shown.output(out(0), b"last\n")
    wait_until(lambda: (tmp_path / console_log.FILE).read_bytes().endswith(b"[0] last\n"))
    os.close(reader)
    shown.drain(lambda: False, STALL_S)
    shown.close()


@pytest.mark.parametrize("reports_full_disk", [True, False], ids=["its own disk", "the agent tells"])
def test_a_full_disk_is_told_at_most_once_and_what_is_lost_is_counted(
    reports_full_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = Logged(tmp_path, reports_full_disk=reports_full_disk)
    monkeypatch.setattr(kept_files, "_KEPT_FREE_BYTES", 1 << 62)
    for _ in range(3):
        logged.console.output(out(0), b"lost\n")
    assert logged.log() == b""
    monkeypatch.undo()
    logged.console.output(out(0), b"there is room again\n")
    log = logged.log().decode()
    # The message itself may be written before or after there is room.
    assert log.replace(FULL, "") == "... 3 lines not shown, see /logs/0/stdout.log\n[0] there is room again\n"
    assert logged.screen.read_text().count(FULL) == reports_full_disk


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "screen", os.O_WRONLY | os.O_CREAT)
    shown = Console(style(), fd, fd)
    shown.keep_log(tmp_path / "gone", reports_full_disk=True)
    shown.output(out(0), b"shown\n")
    shown.drain(lambda: False, STALL_S)
    told = b"ddplaunch: console.log cannot be written (No such file or directory); the job goes on\n"
    assert (tmp_path / "screen").read_bytes().startswith(told)


def test_it_does_not_grow_for_ever_and_no_line_is_cut(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_log, "MAX_BYTES", 1000)
    for number in range(400):
        logged.console.output(out(0), b"%04d\n" % number)
    after = logged.log()
    before = logged.file.with_name(console_log.EARLIER).read_bytes()
    assert len(before) == 1008, "the first line end from 1000 bytes on"
    assert len(after) <= 1008
    numbers = [int(line.removeprefix(b"[0] ")) for line in (before + after).splitlines()]
    assert numbers == list(range(numbers[0], 400))


def test_the_folder_may_be_moved_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_log, "MAX_BYTES", 10)
    (tmp_path / "before").mkdir()
    logged = Logged(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    for _ in range(3):
        logged.console.output(out(0), b"one line\n")
    logged.console.drain(lambda: False, STALL_S)
    names = (console_log.EARLIER, console_log.FILE)
    assert [(tmp_path / "after" / name).read_bytes() for name in names] == [b"[0] one line\n"] * 2


@pytest.mark.parametrize("max_bytes", [10, 1 << 20])
def test_after_it_was_deleted_or_renamed_there_is_a_new_one(
    max_bytes: int, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_log, "MAX_BYTES", max_bytes)
    logged.console.output(out(0), b"one line\n")
    assert logged.log() == b"[0] one line\n"
    logged.file.unlink()
    logged.console.output(out(0), b"the next\n")
    assert logged.log() == b"[0] the next\n"
    if max_bytes == 10:
        logged.file.rename(logged.file.with_name("mine"))
        logged.console.output(out(0), b"the last\n")
        assert logged.log() == b"[0] the last\n"


def test_a_line_without_an_end_does_not_grow_for_ever_either(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_log, "MAX_BYTES", 1000)
    logged.console.show_no_prefix()
    for _ in range(100):
        logged.console.output(out(0), b"\r" + b"x" * 99)
        logged.console.drain(lambda: False, STALL_S)
    assert max(path.stat().st_size for path in logged.file.parent.glob("console.log*")) <= 2100


def test_its_queue_is_bounded(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_writer, "_QUEUE_BYTES", 1 << 20)
    log = logged.console._log
    assert log
    with log._changed:  # Its thread can take nothing.
        for _ in range(100):
            logged.console._log.output(out(0), b"x" * 99_999 + b"\n")  # type: ignore[union-attr]
        assert log._queued_bytes < 2 << 20
        assert sum(header.lost_lines for header in log._dropped.values()) > 80
