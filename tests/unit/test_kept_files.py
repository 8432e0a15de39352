"""Files are written whole or not at all, read without blocking, and what could not be written is told once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ddplaunch.system.files import kept_files

UMASK = os.umask(0o022)
os.umask(UMASK)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o666, 0o666 & ~UMASK)])
def test_a_file_is_replaced_whole(tmp_path: Path, mode: int, expected: int) -> None:
    path = tmp_path / "file.json"
    path.write_text("old and long")
    assert kept_files.write_whole(path, "new \udcff", mode)
    assert path.read_bytes() == b"new \\udcff"
    assert path.stat().st_mode & 0o777 == expected
    assert names(tmp_path) == ["file.json"]


@pytest.mark.parametrize("step", ["open", "write", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(*((kept_files, "open") if step == "write" else (os, step)), fail, raising=False)
        with pytest.raises(OSError, match="Stale"):
            kept_files.write_whole(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.json"]


def test_a_file_stays_that_may_not_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    assert not kept_files.write_whole(path, "new", may_replace=lambda: False)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.json"]


def test_only_regular_files_are_read_and_a_fifo_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(kept_files.NotRegular), kept_files.open_regular(path):
            pass
    (tmp_path / "link").symlink_to("/etc/passwd")
    with kept_files.open_regular(tmp_path / "link") as file:
        assert file.read(1)
    with pytest.raises(OSError, match="symbolic links"), kept_files.open_regular(tmp_path / "link", os.O_NOFOLLOW):
        pass


def test_each_file_that_could_not_be_written_is_told_once_with_the_reason(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d", "later"):
        kept_files.note(tmp_path / name, OSError(errno.ENOSPC, "No space left on device"))
    kept_files.note(tmp_path / "e", RuntimeError("can't start new thread"))
    kept_files.note(Path(f"{tmp_path}2", "other"), OSError(errno.EIO, "Input/output error"))
    with kept_files.noting(tmp_path / "later"):
        kept_files.write_whole(tmp_path / "later", "")
    reasons = "a, b, c and 1 more: No space left on device; e: can't start new thread"
    assert kept_files.not_written(tmp_path) == f"not written, or only in part, in {tmp_path}: {reasons}"
    assert kept_files.not_written(tmp_path) == ""
    assert kept_files.not_written(Path(f"{tmp_path}2"))
