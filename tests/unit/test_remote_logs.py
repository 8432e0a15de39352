"""Log files of other machines: what their agents read, which hosts are asked, and files that shrink."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path

import pytest

from ddplaunch.features.come_back import queries
from ddplaunch.features.come_back.queries import LogPart, ReadLog
from ddplaunch.features.come_back.remote_logs import RemoteLog, RemoteNodes
from tests.support.asked import asked


class Outbox:
    """Of an agent; keeps the last answer."""

    def send_file(self, part: LogPart, data: bytes) -> None:
        self.part, self.data = part, data


def answer(path: str | Path, offset: int = 0) -> tuple[LogPart, bytes]:
    outbox = Outbox()
    queries.serve(ReadLog(str(path), offset), io.BytesIO(), outbox)
    return outbox.part, outbox.data


def read(path: Path, offset: int) -> tuple[bytes, int, bool]:
    part, data = answer(path, offset)
    return data, part.size, part.is_own


def test_a_part_of_a_file_and_why_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"0123456789")
    assert answer(path, 7) == (LogPart(3, "", 10), b"789")
    assert answer(path, 70) == (LogPart(0, "", 10), b"")
    for name, problem in (("", "is not a regular file"), ("gone", "No such file or directory")):
        assert answer(tmp_path / name) == (LogPart(0, problem), b"")
    part, data = answer("a\0b")
    assert (part.nbytes, "embedded null" in part.problem, data) == (0, True, b""), "Python's own words"


def test_a_file_that_was_emptied_is_read_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"

    log = RemoteLog(partial(read, path))
    path.write_bytes(b"0123456789")
    assert (log.read(), log.read()) == (b"0123456789", b"")
    path.write_bytes(b"new")
    assert (log.read(), log.read()) == (b"new", b"")


def test_a_file_of_another_user_does_not_steer_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"\x1b]0;title\x07x\n")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    log = RemoteLog(partial(read, path))
    assert (log.read(), log.read()) == (b"\\x1b]0;title\\x07x\n", b"")
    with path.open("ab") as file:
        file.write(b"\x1bc")
    assert log.read() == b"\\x1bc"


def test_a_node_with_an_ipv6_address_is_a_host() -> None:
    assert RemoteNodes(asked("job7"))._host("fd00::1", "/logs").name == "fd00::1"
    assert RemoteNodes(asked("job7"))._host("gpu1:2222", "/logs").port == 2222
