"""A console that nobody reads holds up no worker and no signal; what it does not show is counted, memory is bounded."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import is_alive, peak_mb, wait_until
from tests.support.runs import PROGRAMS, Running, run, start
from tests.support.screen import CTRL_C, CTRL_Q, CTRL_S, Screen

FLOOD, WRITE = PROGRAMS / "flood.py", PROGRAMS / "write.py"
PLAIN = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}| ", "NO_COLOR": "1"}
WORKERS, LINES, WIDTH = 2, 30_000, 1000
"""60 MB in all: more than the launcher keeps for a console that lags."""

QUEUES_MB = 32 + 16
"""What launcher and agent may hold for it."""


def flood(folder: Path, *more: str | Path) -> tuple[str | Path, ...]:
    """Arguments of a job that prints far too much, tells by files that all is printed, and then waits."""
    options = ("--nproc-per-node", str(WORKERS), "--log-dir", folder, "--rdzv-id", "job", *more)
    return (*options, FLOOD, str(LINES), str(WIDTH), folder / "printed.{rank}")


def wait_for_all_printed(folder: Path) -> None:
    """No worker is held up: each gets to the end of what it prints."""
    wait_until(lambda: len(list(folder.glob("printed.*"))) == WORKERS, 60, "the workers are held up")


def end_of_log(folder: Path, rank: int) -> bytes:
    with open(folder / "job" / "attempt_0" / str(rank) / "stdout.log", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 100))
        return file.read()


def worker_pids(folder: Path) -> list[int]:
    """Of workers whose files hold all, to the last line."""
    pids = []
    for rank in range(WORKERS):
        last = wait_until(lambda rank=rank: re.search(rb"ready \(pid: (\d+)\)\n", end_of_log(folder, rank)), 60)
        pids.append(int(last[1]))
    return pids


def lines_not_shown(text: bytes) -> int:
    return sum(int(count.replace(b",", b"")) for count in re.findall(rb"\.\.\. ([\d,]+) lines not shown, see /", text))


def check_all_accounted_for(shown: bytes) -> None:
    """Every line was shown, whole and in its rank's order, or counted."""
    whole = re.findall(rb"^(\d)\| \1:(\d{8}) x{%d}$" % (WIDTH - 20), shown, re.MULTILINE)
    errors = re.findall(rb"^(\d)\| \1:(\d{8}) error$", shown, re.MULTILINE)
    ready = re.findall(rb"^\d\| ready \(pid: \d+\)$", shown, re.MULTILINE)
    total = WORKERS * (LINES + LINES // 10 + 1)
    assert len(whole) + len(errors) + len(ready) + lines_not_shown(shown) == total
    assert lines_not_shown(shown) > 0, "it was not too much at all"
    for found in (whole, errors):
        for rank in (b"0", b"1"):
            numbers = [number for of, number in found if of == rank]
            assert numbers == sorted(set(numbers))


def press_until_it_ends(running: Running, timeout_s: float = 10.0) -> None:
    """Ctrl-C again and again, as one does who will not wait for the terminal."""
    deadline = time.monotonic() + timeout_s
    while running.process.poll() is None and time.monotonic() < deadline:
        running.signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(0.25)


class Pipe:
    """A console that is a pipe, of which nothing is read until it is told to."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._data = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while data := os.read(self._reader, 1 << 20):
            self._data += data

    def start_reading(self) -> None:
        self._thread.start()

    def read_to_end(self) -> bytes:
        self._thread.join(60)
        return bytes(self._data)

    def close(self) -> None:
        os.close(self._reader)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def start_on(pipe: Pipe, *arguments: str | Path) -> Running:
    try:
        return start(*arguments, env=PLAIN, stdout=pipe.writer, stderr=pipe.writer)
    finally:
        os.close(pipe.writer)


def test_a_pipe_nobody_reads_blocks_no_worker_and_no_signal_and_fills_no_memory(tmp_path: Path, pipe: Pipe) -> None:
    running = start_on(pipe, *flood(tmp_path))
    wait_for_all_printed(tmp_path)
    pids = worker_pids(tmp_path)
    for pid in (running.pid, running.agent_pid()):
        assert peak_mb(pid) < QUEUES_MB + 60
    running.signal(signal.SIGINT)
    wait_until(lambda: not any(map(is_alive, pids)), 10, "the signal did not get through")
    press_until_it_ends(running)
    # One that comes when Python has given up its handlers ends the launcher by SIGINT: 130 in a shell too.
    assert running.finish().returncode in (130, -signal.SIGINT)


def test_a_pipe_that_is_read_late_gets_all_that_was_kept_and_the_count_of_the_rest(tmp_path: Path, pipe: Pipe) -> None:
    running = start_on(pipe, *flood(tmp_path))
    wait_for_all_printed(tmp_path)
    worker_pids(tmp_path)
    pipe.start_reading()
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 143
    shown = pipe.read_to_end()
    check_all_accounted_for(shown)
    assert shown.endswith(b"ddplaunch: stopped; every process of this run has ended\n")


def test_ctrl_s_stops_the_screen_and_nothing_else_and_ctrl_q_goes_on(screen: Screen, tmp_path: Path) -> None:
    running = screen.start(*flood(tmp_path), env=PLAIN)
    screen.wait_for(b"0:00000000")
    screen.type(CTRL_S)
    wait_for_all_printed(tmp_path)
    worker_pids(tmp_path)
    screen.type(CTRL_Q)
    screen.wait_for(b"lines not shown, see /")
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 143
    check_all_accounted_for(screen.close())


def test_ctrl_c_works_at_once_on_a_stopped_screen(screen: Screen, tmp_path: Path) -> None:
    running = screen.start(*flood(tmp_path), env=PLAIN)
    screen.wait_for(b"0:00000000")
    screen.type(CTRL_S)
    wait_for_all_printed(tmp_path)
    pids = worker_pids(tmp_path)
    screen.type(CTRL_C)
    wait_until(lambda: not any(map(is_alive, pids)), 10, "Ctrl-C did not get through")
    assert running.finish().returncode == 130
    assert b"ddplaunch: SIGINT: stopping the workers" in screen.close()


@pytest.mark.slow
def test_the_end_is_told_on_stderr_when_nobody_reads_stdout(tmp_path: Path, pipe: Pipe) -> None:
    options = ("--nproc-per-node", "2", "--log-dir", tmp_path, "--rdzv-id", "job")
    started = time.monotonic()
    finished = run(*options, FLOOD, "20000", "200", env=PLAIN, stdout=pipe.writer)
    os.close(pipe.writer)
    assert time.monotonic() - started < 40
    assert finished.returncode == 0
    pipe.start_reading()
    shown = pipe.read_to_end()
    seen = shown.count(b" x") + len(re.findall(r"^\d\| .* error$", finished.err, re.MULTILINE))
    # What a write had partly got through may count twice, once as shown.
    assert 44_000 <= seen + lines_not_shown(finished.err.encode()) <= 44_000 + 65536 // WIDTH
    assert f"see {tmp_path}/job/attempt_*/0/stdout.log" in finished.err


def test_a_stopped_launcher_blocks_no_worker_and_goes_on_where_it_stopped(tmp_path: Path, pipe: Pipe) -> None:
    """Ctrl-Z on the launcher: the agent keeps what fits and counts the rest."""
    pipe.start_reading()
    running = start_on(pipe, *flood(tmp_path))
    logs = tmp_path / "job" / "attempt_0"
    wait_until(lambda: sum(log.stat().st_size for log in logs.glob("*/stdout.log")), 60)
    agent = running.agent_pid()
    running.signal(signal.SIGSTOP)
    wait_for_all_printed(tmp_path)
    worker_pids(tmp_path)
    assert peak_mb(agent) < QUEUES_MB + 60
    running.signal(signal.SIGCONT)
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 143
    check_all_accounted_for(pipe.read_to_end())


def test_a_terminal_that_hangs_holds_up_no_lone_workers_log(tmp_path: Path) -> None:
    """A lone worker on a pipe is served as all others are."""
    pipe = Pipe()
    options = ("--nproc-per-node", "1", "--log-dir", tmp_path, "--rdzv-id", "job")
    running = start_on(pipe, *options, FLOOD, "100000", "200", tmp_path / "printed.{rank}")
    wait_until(lambda: (tmp_path / "printed.0").exists(), 60)
    pipe.start_reading()
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 143
    assert pipe.read_to_end().count(b":000") == 110_000
    pipe.close()
