"""A console of several ranks shows few redraws of a progress bar: live lines on a terminal, else one in 5 s."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.features.redraws import launcher
from ddplaunch.features.redraws.launcher import RedrawnLines, Redraws
from ddplaunch.launcher.display import console_log
from ddplaunch.launcher.display.console import Console
from ddplaunch.protocol.launcher_agent import Output
from tests.support import golden
from tests.support.consoles import STALL_S, Screens, end, out, read_all, screen, style


class Shown:
    """What was shown: (rank, bytes), and the live lines of a terminal, each time."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.live: list[list[tuple[int, bytes]]] = []
        self.redraws = Redraws(self._show, self._show_live, lambda: is_terminal)

    def _show(self, header: Output, data: bytes) -> None:
        self.lines.append((header.rank, data))

    def _show_live(self, lines: list[tuple[Output, bytes]]) -> None:
        self.live.append([(header.rank, data) for header, data in lines])

    def write(self, rank: int, data: bytes, stream: str = "stderr") -> None:
        self.redraws.output(Output("node1", rank, rank, stream, len(data)), data)  # type: ignore[arg-type]


def test_at_most_one_redraw_per_rank_and_five_seconds_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shown = Shown()
    for percent in range(100):
        now[0] += 0.125
        for rank in (0, 1):
            shown.write(rank, b"\r%d%%" % percent)
    assert shown.lines == [(rank, b"%d%%\n" % percent) for percent in (40, 80) for rank in (0, 1)]
    shown.write(0, b"\r100%\n")
    shown.redraws.flush()
    assert shown.lines[4:] == [(0, b"100%\n"), (1, b"99%\n")]


def test_a_terminal_has_a_live_line_per_rank_until_it_ends() -> None:
    shown = Shown(is_terminal=True)
    shown.write(1, b"\r5%")
    shown.write(0, b"\r1%\r2%")
    shown.write(0, b"loss 0.1\n", "stdout")
    shown.write(1, b"\r6%\n")
    shown.redraws.flush()
    assert shown.live == [[(1, b"5%")], [(0, b"2%"), (1, b"5%")], [(0, b"2%"), (1, b"5%")], [(0, b"2%")], []]
    assert shown.lines == [(0, b"loss 0.1\n"), (1, b"6%\n"), (0, b"2%\n")]


def test_other_output_passes_unchanged() -> None:
    shown = Shown()
    pieces = [b"name? ", b"Ada\nnext\r\n", b"", b"\xff\x00\n"]
    for piece in pieces:
        shown.write(0, piece)
    assert [data for _, data in shown.lines] == pieces


def test_of_progress_bars_in_a_file_the_end_is_shown(tmp_path: Path) -> None:
    golden.check_answers("redrawn_lines", lambda question: screen(tmp_path, question, RedrawnLines))


def test_a_lone_workers_bytes_stay_as_they_are_and_console_log_has_the_end_of_several(tmp_path: Path) -> None:
    for is_plain, shown in ((False, b"[node1:1] 30%\n"), (True, b"\r10%\r20%\r30%\n")):
        with contextlib.closing(Screens(tmp_path)) as screens:
            screens.console.keep_log(tmp_path, reports_full_disk=False)
            if is_plain:
                screens.console.show_no_prefix()
            screens.output = RedrawnLines(screens.console).on_output(screens.output)
            screens.shown(*((out(1), piece) for piece in (b"\r10%", b"\r20%", b"\r30%\n")))
        assert (tmp_path / console_log.FILE).read_bytes() == shown
        (tmp_path / console_log.FILE).unlink()


def test_a_terminal_shows_a_live_line_per_rank_below_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    shown = Console(style(), terminal, terminal)
    output = RedrawnLines(shown).on_output(shown.output)
    for piece in ((out(0), b"\r10%"), (out(1), b"\r20%"), (out(0), b"\r11%"), (out(1), b"\r" + b"x" * 99 + b"\n")):
        output(*piece)
        shown.wait_shown(STALL_S)
    erase, up = b"\r\x1b[K", b"\x1b[1A\x1b[J"
    assert read_all(master, b"x\r\n" + b"[node1:0] 11%") == b"".join(
        (
            b"[node1:0] 10%",
            erase + b"[node1:0] 10%\r\n[node1:1] 20%",
            erase + up + b"[node1:0] 11%\r\n[node1:1] 20%",
            erase + up + b"[node1:1] " + b"x" * 99 + b"\r\n[node1:0] 11%",
        )
    )
    end(shown, terminal)
    os.close(master)
