"""A file is read from its last lines on, without a gap where its writer begins another one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ddplaunch.config import LINE_PREFIX
from ddplaunch.features.come_back.attach import colouring
from ddplaunch.features.come_back.log_follower import LogFollower
from tests.support import golden


class Log:
    """console.log and a process that follows it. The methods are the steps of a story."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.file, self.follower = folder / "console.log", LogFollower(folder, "console.log")
        self.said: list[str] = []

    def append(self, text: str, count: str = "1") -> None:
        r"""``text`` so many times; ``\n`` is a line end, ``\r`` a carriage return."""
        with self.file.open("a", newline="") as file:
            file.write(text.encode().decode("unicode_escape") * int(count))

    def rotates(self) -> None:
        """The writer renames the file, and begins another one with the next text."""
        self.file.replace(self.file.with_name("console.log.1"))

    def empties(self) -> None:
        """Somebody does, as by ``> console.log``."""
        os.truncate(self.file, 0)

    def pipe(self) -> None:
        """There is something else in its place."""
        os.mkfifo(self.file)

    def begins(self) -> None:
        """Another process follows the file."""
        self.follower = LogFollower(self.file.parent, self.file.name)

    def last(self, lines: str) -> None:
        self.said.append(f"{self.follower.last_lines(int(lines))!r}")

    def read(self) -> None:
        data = b"".join(iter(self.follower.read, b""))
        self.said.append(f"{data!r}" if len(data) < 100 else f"{len(data)} bytes of {set(data.splitlines())}")
        self.said += ["with a gap"] * self.follower.has_gap

    def skip(self, max_bytes: str) -> None:
        self.said.append(f"{self.follower.skip(int(max_bytes))} bytes are left out")


def test_what_is_read(tmp_path: Path) -> None:
    def story(text: str) -> str:
        told = golden.play(log := Log(tmp_path / "run"), text.partition(": ")[2])
        log.follower.close()
        shutil.rmtree(tmp_path / "run")
        return told

    golden.check_pages("followed_logs", story)


def test_prefixes_have_the_colours_of_their_ranks() -> None:
    colour = colouring(LINE_PREFIX)
    assert colour(b"[n1:0] a\n[n1:11] b") == b"\x1b[36m[n1:0] \x1b[0ma\n\x1b[32m[n1:11] \x1b[0mb"
    assert colour(b"[n1:1] middle of a line\nddplaunch: x\n[n1:2] c\n") == (
        b"[n1:1] middle of a line\nddplaunch: x\n\x1b[33m[n1:2] \x1b[0mc\n"
    )
    for rank in (b"x", b"1" * 5000):
        assert colour(b"[n1:%b] y\n" % rank) == b"[n1:%b] y\n" % rank


def test_a_template_of_the_user_is_recognized_if_it_has_the_rank() -> None:
    """A question is a template and a line."""

    def coloured(question: str) -> bytes:
        template, _, line = question.partition(" : ")
        return colouring(template)(line.encode())

    assert colouring("")(b"host x\n") == b"host x\n"
    golden.check_answers("coloured_prefixes", coloured)
