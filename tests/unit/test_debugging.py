"""Which rank has the terminal, and when it changes; what is sent to the agents, and what is shown."""

from __future__ import annotations

import base64
import fcntl
import os
import pty
import queue
import resource
import signal
import time
from typing import Any

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.features.debug import launcher as debugging
from ddplaunch.features.debug.launcher import Debugging, KeysTyped, SessionEvents, TerminalResized
from ddplaunch.features.debug.records import (
    GiveTerminal,
    LeaveSession,
    RefuseTerminal,
    SessionClosed,
    SessionOpened,
    SessionOutput,
    SessionRuns,
    TakeOutput,
    TypeKeys,
)
from ddplaunch.launcher.display import terminal
from ddplaunch.protocol.control import LeaveTerminal, StopRun
from ddplaunch.protocol.launcher_agent import AttemptStarted
from ddplaunch.system.signals import SignalReceived
from ddplaunch.transport.handle import ChannelClosed


class FakeTerminal:
    size = (30, 100)

    def __init__(self, *_: object) -> None:
        self.is_raw, self.modes = False, terminal.ScreenModes()

    def take(self) -> None:
        self.is_raw = True

    def restore(self) -> None:
        self.is_raw = False

    close = restore


class FakeConsole:
    stdout_fd = 1

    def __init__(self) -> None:
        self.text, self.is_held = "", False
        self.noted: list[str] = []

    def raw(self, data: bytes, written: Any = lambda: None) -> None:
        self.text += data.decode()
        written()

    def hold(self, *, is_held: bool) -> None:
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


class Job:
    """A launcher of nodes with one worker each; sessions have the number of their rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int = 3) -> None:
        self.is_terminal = self.is_foreground = True
        monkeypatch.setattr(debugging.os, "isatty", lambda _fd: self.is_terminal)
        monkeypatch.setattr(terminal, "Terminal", FakeTerminal)
        monkeypatch.setattr(terminal, "is_in_foreground", lambda _fd: self.is_foreground)
        monkeypatch.setitem(os.environ, "TERM", "xterm")
        self.sent: list[tuple[int, object]] = []
        self.later_s = 0.0
        self.console, self.shutdown, nodes = FakeConsole(), FakeShutdown(), self
        config = LaunchConfig(script="x.py")
        self.debugging = Debugging(config, nodes, self.shutdown, self.console, lambda _event: None)  # type: ignore[arg-type]
        self.event(0, AttemptStarted(0, world_size, (1,), 0, world_size, 0))

    def send_to(self, index: int, record: object) -> None:
        self.sent.append((index, record))

    def event(self, rank: int, event: object) -> None:
        self.debugging.on_event(rank, (), event)

    def stop(self, *ranks: int, is_post_mortem: bool = False) -> None:
        for rank in ranks:
            self.event(rank, SessionOpened(rank, 0, rank, f"gpu{rank}", "at breakpoint() (x.py:1)", is_post_mortem))

    def settle(self) -> None:
        self.later_s += 10
        self.debugging.run_due(time.monotonic() + self.later_s)

    def given(self) -> list[int]:
        """Ranks that have got the terminal since the last call."""
        given = [index for index, record in self.sent if isinstance(record, GiveTerminal)]
        self.sent = [(index, record) for index, record in self.sent if not isinstance(record, GiveTerminal)]
        return given

    def take_sent(self) -> list[object]:
        sent, self.sent = [record for _, record in self.sent], []
        return sent


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def output(rank: int, text: bytes) -> SessionOutput:
    return SessionOutput(rank, base64.b64encode(text).decode())


def test_the_lowest_of_those_that_stop_together_begins(job: Job) -> None:
    job.stop(2, 1)
    assert job.debugging.run_due(time.monotonic()) > time.monotonic()
    assert not job.given()
    job.settle()
    assert job.given() == [1]
    assert (
        "rank 1 on gpu1 stopped at breakpoint() (x.py:1) and has the terminal; rank 2 waits for it" in job.console.text
    )
    assert "with --debug-ranks 1 only this rank stops" in job.console.text
    assert job.console.is_held
    assert len(job.console.noted) == 1, "also in console.log"


def test_the_run_keeps_a_terminal_that_a_rank_needs(job: Job) -> None:
    assert not job.debugging.refuses(LeaveTerminal("tag"))
    job.stop(1)
    assert job.debugging.refuses(LeaveTerminal("tag")) == "a rank has stopped in a debugger and needs it"
    assert not job.debugging.refuses(StopRun("tag"))


def test_when_all_have_stopped_nobody_is_waited_for(job: Job) -> None:
    job.stop(2, 1, 0)
    job.debugging.run_due(time.monotonic())
    assert job.given() == [0]


def test_who_goes_on_lets_the_next_one_have_the_terminal(job: Job) -> None:
    job.stop(0, 2)
    job.settle()
    job.event(0, SessionClosed(0))
    job.settle()
    assert job.given() == [0, 2]
    assert LeaveSession(0) in job.take_sent()
    job.event(2, SessionClosed(2))
    assert not job.console.is_held
    assert job.debugging.run_due(time.monotonic()) == float("inf")


def test_a_long_step_lets_another_have_the_terminal_for_a_while(job: Job) -> None:
    job.stop(0, 1)
    job.settle()
    job.event(0, SessionRuns(0, is_running=True))
    job.settle()
    assert job.given() == [0, 1]
    job.event(0, output(0, b"(Pdb) "))
    assert job.take_sent() == [TakeOutput(0)]
    job.event(0, SessionRuns(0, is_running=False))
    job.settle()
    assert not job.given()
    assert "(Pdb)" not in job.console.text
    job.event(1, SessionClosed(1))
    job.settle()
    assert job.given() == [0]
    assert job.console.text.endswith("rank 0 on gpu0 has the terminal again\r\n(Pdb) ")


def test_a_long_step_that_nobody_waits_for_keeps_the_terminal(job: Job) -> None:
    job.stop(0)
    job.settle()
    job.event(0, SessionRuns(0, is_running=True))
    job.settle()
    assert job.given() == [0]
    assert job.console.is_held


def test_output_is_taken_once_it_is_shown(job: Job) -> None:
    job.stop(0)
    job.settle()
    job.take_sent()
    job.event(0, output(0, b"\x1b[1mbold"))
    assert job.take_sent() == [TakeOutput(0)]
    job.event(0, SessionOutput(0, "no base64!"))
    assert job.take_sent() == [TakeOutput(0)]
    job.event(0, SessionClosed(0))
    assert job.console.text.endswith("\x1b[1mbold\r\n"), "the next message begins in column 0"


def test_what_a_debugger_has_changed_is_undone_at_its_end(job: Job) -> None:
    job.stop(0, 1)
    job.settle()
    for piece in (b"\x1b[?1049h\x1b[?12;100", b"0h\x1b[?25l\x1b[?7h\x1b[?2004h\x1b[?2004l\x1b[?12l"):
        job.event(0, output(0, piece))
    job.event(0, SessionClosed(0))
    job.settle()
    assert "\x1b[?25h\x1b[?1000l\x1b[?1049lddplaunch: rank 1 on gpu1 stopped" in job.console.text


def test_keys_are_read_from_a_descriptor_of_any_number() -> None:
    keys: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    master, slave = pty.openpty()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    high = fcntl.fcntl(slave, fcntl.F_DUPFD, 1100)
    used = terminal.Terminal(high, high, keys.put, lambda: None)
    try:
        used.take()
        os.write(master, b"p x\r")
        assert keys.get(timeout=10) == b"p x\r"
    finally:
        used.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in (master, slave, high):
            os.close(fd)


def test_what_is_hidden_is_bounded(job: Job) -> None:
    job.stop(0, 1)
    job.settle()
    for _ in range(100):
        job.event(1, output(1, b"x" * 4000))
    job.event(0, SessionClosed(0))
    job.settle()
    assert 60_000 < len(job.console.text) < 70_000


def test_keys_and_sizes_go_to_the_rank_with_the_terminal(job: Job) -> None:
    job.debugging.on_terminal(KeysTyped(b"lost"))
    job.stop(1)
    job.settle()
    job.take_sent()
    job.debugging.on_terminal(KeysTyped(b"n\r"))
    job.debugging.on_terminal(TerminalResized())
    assert job.take_sent() == [TypeKeys(1, base64.b64encode(b"n\r").decode()), GiveTerminal(1, "xterm", 30, 100)]


def test_ctrl_c_twice_within_a_second_stops_the_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(debugging.time, "monotonic", lambda: now[0])
    job.stop(1)
    job.debugging.run_due(200.0)
    for now[0] in (201.0, 203.0):
        job.debugging.on_terminal(KeysTyped(b"\x03"))
        assert not job.shutdown.signals
    now[0] = 203.5
    job.debugging.on_terminal(KeysTyped(b"\x03"))
    assert job.shutdown.signals == [signal.SIGINT]
    job.debugging.run_due(204.0)
    assert job.take_sent()[-1] == LeaveSession(1)
    assert not job.console.is_held


def test_quit_stops_the_run(job: Job) -> None:
    job.stop(0, 1)
    job.settle()
    job.event(0, SessionClosed(0, has_quit=True))
    assert job.shutdown.quit_by == "rank 0 on gpu0"
    job.settle()
    assert job.given() == [0]
    job.stop(2)
    job.settle()
    assert job.given() == []


def test_without_a_terminal_every_rank_is_refused(job: Job) -> None:
    job.is_terminal = False
    job.stop(0, 1)
    job.settle()
    assert job.take_sent() == [RefuseTerminal(rank, "stdin of ddplaunch is not one") for rank in (0, 1)]


def test_in_the_background_a_rank_waits(job: Job) -> None:
    job.is_foreground = False
    job.stop(1)
    job.settle()
    job.settle()
    assert job.console.text.count("rank 1 on gpu1 stopped at breakpoint() (x.py:1); it gets the terminal when") == 1
    job.is_foreground = True
    job.settle()
    assert job.given() == [1]


def test_a_lost_node_gives_the_terminal_back(job: Job) -> None:
    job.stop(1)
    job.settle()
    job.event(1, ChannelClosed())
    assert not job.console.is_held
    job.event(1, output(1, b"late"))
    assert "late" not in job.console.text


def test_a_suspended_launcher_gives_the_terminal_back_meanwhile(job: Job) -> None:
    job.stop(1)
    job.settle()
    with job.debugging.suspended():
        assert not job.console.is_held
    job.settle()
    assert job.given() == [1, 1]
    assert job.console.is_held


def test_after_a_post_mortem_the_attempt_is_over_for_those_that_wait(job: Job) -> None:
    job.stop(2, 1, is_post_mortem=True)
    job.settle()
    job.event(1, SessionClosed(1))
    job.settle()
    assert job.given() == [1]
    assert not job.console.is_held


def test_sessions_are_in_the_events_of_the_run() -> None:
    noted: list[tuple[str, int, str]] = []
    events = SessionEvents(lambda event, index, text, **_: noted.append((event, index, text)))
    opened = SessionOpened(session=7, attempt=2, rank=3, host="gpu2", place="at breakpoint() (train.py:5)")
    for index, event in ((1, opened), (0, SessionClosed(7)), (1, SessionClosed(7, has_quit=True))):
        events.on_event(index, (0, 1), event)
    assert noted == [
        ("debugger_opened", 1, "rank 3 stopped at breakpoint() (train.py:5)"),
        ("debugger_closed", 1, "the user has quit"),
    ]
