"""A console of several ranks shows few redraws of a progress bar: live lines on a terminal, else one in 5 s."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddplaunch.launcher.display import redraws
from ddplaunch.launcher.display.redraws import Redraws
from ddplaunch.protocol.launcher_agent import Output


class Shown:
    """What was shown: (rank, bytes), and the live lines of a terminal, each time."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.live: list[list[tuple[int, bytes]]] = []
        self.redraws = Redraws(self._show, self._show_live if is_terminal else None)

    def _show(self, header: Output, data: bytes) -> None:
        self.lines.append((header.rank, data))

    def _show_live(self, lines: list[tuple[Output, bytes]]) -> None:
        self.live.append([(header.rank, data) for header, data in lines])

    def write(self, rank: int, data: bytes, stream: str = "stderr") -> None:
        self.redraws.output(Output("node1", rank, rank, stream, len(data)), data)  # type: ignore[arg-type]


def test_at_most_one_redraw_per_rank_and_five_seconds_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(redraws, "time", SimpleNamespace(monotonic=lambda: now[0]))
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
