"""Which rank has the terminal, and when it changes; what is sent to the agents, and what is shown."""

from __future__ import annotations

import base64
import fcntl
import os
import pty
import queue
import resource
import select
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.features.debug import launcher as debugging
from ddplaunch.features.debug import terminal
from ddplaunch.features.debug.launcher import Debugging
from ddplaunch.features.debug.records import SessionChanged, SessionOpened, SessionOutput
from ddplaunch.protocol.launcher_agent import AttemptStarted
from ddplaunch.system.signals import SignalReceived
from ddplaunch.transport.handle import ChannelClosed
from tests.support import golden
from tests.support.watches import call, run_services


class FakeTerminal:
    size = (30, 100)

    def __init__(self, said: list[str], on_keys: Any, on_resized: Any) -> None:
        self.is_raw, self.modes, self.on_keys, self.on_resized = False, terminal.ScreenModes(), on_keys, on_resized
        self.said = said

    def take(self, *, drops_typed: bool) -> None:
        if not self.is_raw and drops_typed:
            self.said.append("what was typed before is dropped")
        self.is_raw = True

    def restore(self) -> None:
        self.is_raw = False

    close = restore


class FakeConsole:
    stdout_fd = 1

    def __init__(self) -> None:
        self.text, self.is_held, self.is_written = "", False, True
        self.noted: list[str] = []

    def raw(self, data: bytes, written: Any = lambda: None) -> None:
        self.text += data.decode()
        self.is_written = self.is_written and not data
        written()

    def wait_raw(self, _timeout_s: float) -> None:
        self.is_written = True

    def hold(self, *, is_held: bool) -> None:
        assert is_held or self.is_written, "a message could be shown on the screen of the debugger"
        self.is_held = is_held

    def show(self, text: str) -> None:
        self.text += f"{text}\n"

    def note(self, text: str) -> None:
        self.noted.append(text)

    def flush(self) -> None: ...

    def wait_shown(self, _timeout_s: float) -> None: ...


class FakeShutdown:
    def __init__(self) -> None:
        self.signals: list[int] = []
        self.quit_by = ""

    @property
    def in_progress(self) -> bool:
        return bool(self.signals or self.quit_by)

    def on_signal(self, event: SignalReceived) -> None:
        self.signals.append(event.signum)

    def on_quit(self, who: str) -> None:
        self.quit_by = who

    def __str__(self) -> str:
        return f"stops by {self.signals or self.quit_by}"


class Job:
    """A launcher of nodes with one worker each; sessions have the number of their rank. Methods are steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_terminal = self.is_foreground = True
        monkeypatch.setattr(debugging.os, "isatty", lambda _fd: self.is_terminal)
        monkeypatch.setattr(terminal, "Terminal", self.opened)
        monkeypatch.setattr(terminal, "is_in_foreground", lambda _fd: self.is_foreground)
        monkeypatch.setitem(os.environ, "TERM", "xterm")
        self.now = 1000.0
        monkeypatch.setattr(debugging.time, "monotonic", lambda: self.now)
        self.said: list[str] = []
        self.console, self.shutdown = FakeConsole(), FakeShutdown()
        config = LaunchConfig(script="x.py")
        messages = SimpleNamespace(console=self.console)
        self.debugging = Debugging(
            run_services(config, post=call, nodes=self, shutdown=self.shutdown, messages=messages)
        )
        self.start("0", "3")

    def opened(self, _stdin: int, _stdout: int, *arguments: Any) -> FakeTerminal:
        self.terminal = FakeTerminal(self.said, *arguments)
        return self.terminal

    def send_to(self, index: int, record: object) -> None:
        self.said.append(f"to node {index}: {record}")

    def event(self, rank: str | int, event: object) -> None:
        self.debugging.on_event(int(rank), event)

    def start(self, attempt: str, workers: str) -> None:
        self.event(0, AttemptStarted(int(attempt), int(workers), (1,), 0, int(workers), 0))

    def stop(self, *ranks: str, is_post_mortem: bool = False) -> None:
        for rank in map(int, ranks):
            self.event(rank, SessionOpened(rank, 0, rank, f"gpu{rank}", "at breakpoint() (x.py:1)", is_post_mortem))

    def fail(self, *ranks: str) -> None:
        self.stop(*ranks, is_post_mortem=True)

    def later(self, seconds: str) -> None:
        """Whether the watch wants to be called again is told."""
        self.now += float(seconds)
        if self.debugging.run_due(self.now) == float("inf"):
            self.said.append("nothing is due")

    def runs(self, rank: str) -> None:
        self.event(rank, SessionChanged(int(rank), "running"))

    def rests(self, rank: str) -> None:
        self.event(rank, SessionChanged(int(rank), "stopped"))

    def close(self, rank: str) -> None:
        self.event(rank, SessionChanged(int(rank), "over"))

    def quit(self, rank: str) -> None:
        self.event(rank, SessionChanged(int(rank), "quit"))

    def output(self, rank: str, text: str) -> None:
        data = text.encode().decode("unicode_escape").encode()
        self.event(rank, SessionOutput(int(rank), base64.b64encode(data).decode()))

    def garbage(self, rank: str) -> None:
        self.event(rank, SessionOutput(int(rank), "no base64!"))

    def lose(self, rank: str) -> None:
        self.event(rank, ChannelClosed())

    def type(self, keys: str) -> None:
        self.terminal.on_keys(keys.encode().decode("unicode_escape").encode())

    def resize(self) -> None:
        self.terminal.on_resized()

    def choose(self, *ranks: str) -> None:
        """As ``--debug-ranks``."""
        self.debugging._chosen = frozenset(map(int, ranks))

    def piped(self) -> None:
        self.is_terminal = False

    def background(self) -> None:
        self.is_foreground = False

    def foreground(self) -> None:
        self.is_foreground = True

    def suspend(self) -> None:
        """And continue."""
        with self.debugging.suspended():
            self.said.append(f"suspended, console held: {self.console.is_held}")

    def play(self, step: str) -> str:
        self.said.clear()
        shown, noted = len(self.console.text), len(self.console.noted)
        held, stops = self.console.is_held, str(self.shutdown)
        word, *arguments = step.split(" ", 2)
        getattr(self, word)(*(arguments if word == "output" else " ".join(arguments).split()))
        self.said += [f"shows: {self.console.text[shown:]!r}"] if self.console.text[shown:] else []
        self.said += [f"notes: {text!r}" for text in self.console.noted[noted:]]
        self.said += [f"console held: {self.console.is_held}"] if held != self.console.is_held else []
        self.said += [str(self.shutdown)] if stops != str(self.shutdown) else []
        return "\n".join([step, *(f"    {line}" for line in self.said)])


def test_who_has_the_terminal_and_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    golden.check_pages(
        "debugging", lambda story: "\n".join(map(Job(monkeypatch).play, story.partition(": ")[2].split(", ")))
    )


def test_keys_are_read_from_a_descriptor_of_any_number_and_none_of_before_a_session_of_another_node() -> None:
    keys: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    master, slave = pty.openpty()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    high = fcntl.fcntl(slave, fcntl.F_DUPFD, 1100)
    used = terminal.Terminal(high, high, keys.put, lambda: None)
    try:
        os.write(master, b"a password\r")
        assert select.select([slave], [], [], 10)[0], "the kernel passes it on later"
        used.take(drops_typed=True)
        os.write(master, b"p x\r")
        assert keys.get(timeout=10) == b"p x\r"
    finally:
        used.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in (master, slave, high):
            os.close(fd)


def test_what_is_hidden_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    for step in ("stop 0 1", "later 10", *["output 1 " + "x" * 4000] * 100, "close 0", "later 10"):
        job.play(step)
    assert 60_000 < len(job.console.text) < 70_000
