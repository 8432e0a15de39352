"""A file is read from its last lines on, without a gap where its writer begins another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch.config import LINE_PREFIX
from ddplaunch.features.come_back.attach import colouring
from ddplaunch.features.come_back.log_follower import LogFollower
from tests.support import golden


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "console.log"


def rest(follower: LogFollower) -> bytes:
    return b"".join(iter(follower.read, b""))


def append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def rotate(log: Path) -> None:
    log.replace(log.with_name("console.log.1"))


def test_the_last_lines_come_first_and_then_what_follows(log: Path) -> None:
    follower = LogFollower(log.parent, log.name)
    assert follower.last_lines(2) == follower.read() == b""
    append(log, "1\n2\n3\nunfinished")
    assert rest(follower) == b"1\n2\n3\nunfinished"
    again = LogFollower(log.parent, log.name)
    assert again.last_lines(2) == b"3\nunfinished"
    append(log, " line\n")
    assert rest(again) == rest(follower) == b" line\n"
    assert LogFollower(log.parent, log.name).last_lines(0) == b""


def test_a_progress_bar_is_one_line(log: Path) -> None:
    append(log, "first\nbar: " + "".join(f"\r{number}%" for number in range(100)))
    assert LogFollower(log.parent, log.name).last_lines(2).startswith(b"first\nbar: \r0%")


def test_a_file_that_somebody_empties_is_read_from_its_beginning(log: Path) -> None:
    append(log, "1\n2\n3\n")
    follower = LogFollower(log.parent, log.name)
    follower.last_lines(1)
    os.truncate(log, 0)
    append(log, "4\n")
    assert rest(follower) == b"4\n"
    assert follower.has_gap


def test_what_is_no_file_is_not_read(log: Path) -> None:
    os.mkfifo(log)
    follower = LogFollower(log.parent, log.name)
    assert follower.last_lines(1) == follower.read() == b""


def test_a_new_file_is_read_from_its_beginning(log: Path) -> None:
    append(log, "1\n")
    follower = LogFollower(log.parent, log.name)
    follower.last_lines(1)
    append(log, "2\n")
    rotate(log)
    assert rest(follower) == b"2\n"
    append(log, "3\n")
    assert rest(follower) == b"3\n"
    assert not follower.has_gap


def test_a_reader_that_was_stopped_for_two_files_reads_both_that_are_left(log: Path) -> None:
    append(log, "1\n")
    follower = LogFollower(log.parent, log.name)
    follower.last_lines(1)
    for line in ("2\n", "3\n", "4\n"):
        append(log, line)
        rotate(log)
    append(log, "5\n")
    assert rest(follower) == b"2\n4\n5\n", "3 was deleted"
    assert follower.has_gap


def test_what_is_far_behind_is_left_out_up_to_a_whole_line(log: Path) -> None:
    append(log, "first\n")
    follower = LogFollower(log.parent, log.name)
    follower.last_lines(1)
    append(log, "line\n" * 30_000)
    assert follower.skip(1 << 20) == 0
    skipped = follower.skip(100_000)
    data = rest(follower)
    assert skipped + len(data) == 150_000
    assert set(data.splitlines()) == {b"line"}


def test_prefixes_have_the_colours_of_their_ranks(log: Path) -> None:
    colour = colouring(LINE_PREFIX)
    assert colour(b"[n1:0] a\n[n1:11] b") == b"\x1b[36m[n1:0] \x1b[0ma\n\x1b[32m[n1:11] \x1b[0mb"
    assert colour(b"[n1:1] middle of a line\nddplaunch: x\n[n1:2] c\n") == (
        b"[n1:1] middle of a line\nddplaunch: x\n\x1b[33m[n1:2] \x1b[0mc\n"
    )
    assert colour(b"[n1:x] y\n") == b"[n1:x] y\n"


def test_a_template_of_the_user_is_recognized_if_it_has_the_rank() -> None:
    """A question is a template and a line."""

    def coloured(question: str) -> bytes:
        template, _, line = question.partition(" : ")
        return colouring(template)(line.encode())

    assert colouring("")(b"host x\n") == b"host x\n"
    golden.check_answers("coloured_prefixes", coloured)
