"""What the workers' store and the member write is kept, and shown for what it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch.agent.helper_output import HelperOutput
from ddplaunch.protocol.launcher_agent import Notice


def written(output: HelperOutput, data: bytes) -> str:
    os.write(output.fd, data)
    os.close(output.fd)
    return output.last_line(10)


@pytest.mark.parametrize("is_kept", [True, False])
def test_lines_are_kept_and_shown_with_v_under_the_name_of_the_helper(is_kept: bool, tmp_path: Path) -> None:
    shown: list[Notice] = []
    folder, moved = tmp_path / "run", tmp_path / "moved"
    output = HelperOutput("the store", folder / "store.log" if is_kept else None, shown.append)
    if is_kept:
        assert not list(folder.iterdir())
        folder.rename(moved)  # As the folders of launchers on several nodes, which move into that of the run.
    assert written(output, b"one\n[W two\xff") == "[W two\\xff"
    assert shown == [Notice("the store: one", 1), Notice("the store: [W two\\xff", 1)]
    assert not is_kept or (moved / "store.log").read_bytes() == b"one\n[W two\xff"


def test_the_stack_of_an_error_in_torch_is_kept_and_not_shown(tmp_path: Path) -> None:
    shown: list[Notice] = []
    output = HelperOutput("the store", tmp_path / "store.log", shown.append)
    error = b"[W1] recvValue failed on SocketImpl(fd=7)\n"
    stack = b"Exception raised from recvBytes at /x.cpp:670 (most recent call first):\nframe #0: c10::Error + 0x80\n"
    stack += b"<omitting python frames>\n\n"
    assert written(output, error + stack) == error.decode().strip()
    assert shown == [Notice(f"the store: {error.decode().strip()}", 1)]
    assert (tmp_path / "store.log").read_bytes() == error + stack


def test_a_helper_that_writes_without_end_is_shown_in_part_and_kept_whole(tmp_path: Path) -> None:
    shown: list[Notice] = []
    output = HelperOutput("the store", tmp_path / "store.log", shown.append)
    assert written(output, b"".join(b"%d\n" % number for number in range(1000))) == "999"
    assert len(shown) == 100
    assert len((tmp_path / "store.log").read_bytes().splitlines()) == 1000


def test_a_helper_that_writes_nothing_leaves_no_file(tmp_path: Path) -> None:
    assert written(HelperOutput("the store", tmp_path / "store.log", lambda _: None), b"") == ""
    assert not list(tmp_path.iterdir())
