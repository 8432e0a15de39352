"""``launch(config, stdout_fd=FD)``: what looks at the user's stdout looks at this descriptor, not at number 1."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.launcher import setup
from ddplaunch.transport import agent_process

CONFIG = LaunchConfig(script="x.py")


@pytest.fixture
def file_and_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Descriptors of a file and of a terminal; number 1 is said to be a terminal too."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    isatty = os.isatty
    master, terminal = os.openpty()
    file = os.memfd_create("stdout")
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 1 or isatty(fd))
    with contextlib.ExitStack() as stack:
        for fd in (master, terminal, file):
            stack.callback(os.close, fd)
        yield file, terminal


def test_a_worker_inherits_the_given_terminal_and_no_other(file_and_terminal: tuple[int, int]) -> None:
    file, terminal = file_and_terminal
    assert "stdout" not in agent_process._shared_terminals(CONFIG, file)
    assert agent_process._shared_terminals(CONFIG, terminal)["stdout"] == terminal


def test_lines_have_colours_only_in_a_terminal(file_and_terminal: tuple[int, int]) -> None:
    file, terminal = file_and_terminal
    assert [setup.console_style(CONFIG, None, fd).colour["stdout"] for fd in (file, terminal, 1)] == [False, True, True]


def test_the_agent_that_the_transport_starts_has_it_too(
    file_and_terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    class Started(Exception): ...

    def start_node(_config: LaunchConfig, _tag: str, is_first: bool, stdout_fd: int) -> None:
        given.append(stdout_fd)
        raise Started

    monkeypatch.setattr(agent_process, "start_node", start_node)
    file, _ = file_and_terminal
    with contextlib.suppress(Started):
        setup.transport_for(CONFIG, "r1", lambda *_: None, lambda _: None, None, file).start(0)
    assert given == [file]
