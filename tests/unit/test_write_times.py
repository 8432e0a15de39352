"""Marks in a worker's output: the order of its two streams, from what its pipes have gathered."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.agent.workers import worker_terminal
from ddplaunch.agent.workers.output import Stream
from ddplaunch.agent.workers.pump import Pump
from ddplaunch.agent.workers.worker_terminal import TerminalStream
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.protocol.results import StreamName
from ddplaunch.protocol.write_times import begin_of_mark, mark, pieces
from ddplaunch.system.linux import output_pipe

texts = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(min_size=1).filter(lambda text: 0 not in text)))


@given(st.binary().filter(lambda text: 0 not in text), texts)
def test_what_stands_behind_a_mark_has_its_time(first: bytes, marked: list[tuple[int, bytes]]) -> None:
    whole = first + b"".join(mark(time_ns) + text for time_ns, text in marked)
    assert pieces(whole, 7) == [(time_ns, text) for time_ns, text in [(7, first), *marked] if text or not marked]


@pytest.mark.parametrize("text", [b"\0", b"\0\x1b", mark(1)[:-1], b"a\0b", b"\0" * 40])
def test_zeros_of_the_script_are_no_marks(text: bytes) -> None:
    assert pieces(b"x" + text, 1) == [(1, b"x" + text)]


@given(st.binary().filter(lambda text: 0 not in text), st.booleans(), st.integers(0, len(mark(1))))
def test_the_begin_of_a_mark_is_found_however_little_of_it_there_is(text: bytes, is_second: bool, length: int) -> None:
    before = text + mark(1) * is_second
    data = before + mark(7)[:length]
    assert begin_of_mark(data) == (len(before) if 0 < length < len(mark(7)) else len(data))


class Shown:
    """What a pump shows, in order."""

    def __init__(self) -> None:
        self.text = b""

    def __call__(self, _header: Output, data: bytes) -> bool:
        self.text += data
        return True


ShownOf = Callable[..., str]


@pytest.fixture(params=["pipes", "pseudo-terminals"])
def shown_of(request: pytest.FixtureRequest, tmp_path: Path) -> ShownOf:
    """What the agent shows of a program whose stdout and stderr are pipes, or what a worker on a terminal has."""

    def of_pipes(program: str, *args: str) -> str:
        shown = Shown()
        ends = zip(output_pipe(), output_pipe(), strict=True)
        _pumped(program, args, ends, [Stream(_header(name), shown, None) for name in NAMES])
        return shown.text.decode()

    def of_terminals(program: str, *args: str) -> str:
        for_console_log = Shown()
        with open(tmp_path / "terminal", "w+b", buffering=0) as terminal:
            streams = [
                TerminalStream(_header(name), for_console_log, None, terminal_fd=terminal.fileno()) for name in NAMES
            ]
            _pumped(program, args, zip(worker_terminal.open_pair(), worker_terminal.open_pair(), strict=True), streams)
            terminal.seek(0)
            shown = terminal.read()
        assert Counter(for_console_log.text) == Counter(shown), "there it is divided into lines"
        return shown.decode()

    return of_pipes if request.param == "pipes" else of_terminals


NAMES: tuple[StreamName, ...] = ("stdout", "stderr")


def _header(name: StreamName) -> Output:
    return Output("node1", 0, 0, name, 0)


def _pumped(program: str, args: Iterable[str], ends: Iterable[tuple[int, ...]], streams: Iterable[Stream]) -> None:
    readers, writers = ends
    pump = Pump(dict(zip(readers, streams, strict=True)), "test")
    command = [sys.executable, "-u", "-c", PRELUDE + program, *args]
    process = subprocess.Popen(command, stdout=writers[0], stderr=writers[1])
    for fd in writers:
        os.close(fd)
    assert process.wait(60) == 0
    assert pump.join(time.monotonic() + 60, time.monotonic())


PRELUDE = """
import os, sys
from ddplaunch.worker import marked_output
marked_output.mark_streams()
"""


def test_a_mark_that_a_terminal_has_only_begun_waits_for_its_end(tmp_path: Path) -> None:
    """The writer has lost the CPU within it."""
    whole, (reader, writer) = mark(7), worker_terminal.open_pair()
    with open(tmp_path / "terminal", "w+b", buffering=0) as terminal:
        stream = TerminalStream(_header("stdout"), Shown(), None, terminal_fd=terminal.fileno())
        end = stream.opened(reader)
        os.write(writer, b"before" + whole[:3])
        assert [text for _, _, text in end.read(1)] == [b"before"]
        assert end.read(1) == [], "there is nothing to read now"
        os.write(writer, whole[3:] + b"behind")
        assert [text for _, _, text in end.read(1)] == [b"behind"]
        stream.close()
    os.close(reader)
    os.close(writer)


def test_lines_that_are_longer_than_a_pipe_keep_their_order(shown_of: ShownOf) -> None:
    lengths = [1_500_000] * 2 + [200_000] * 18
    program = f"""
for number, length in enumerate({lengths}):
    print(str(number % 10) * length, file=(sys.stdout, sys.stderr)[number % 2])
"""
    lines = shown_of(program).split()
    assert [(line[0], len(line)) for line in lines] == [(str(n % 10), length) for n, length in enumerate(lengths)]


def test_a_child_has_an_order_of_its_own(shown_of: ShownOf) -> None:
    program = """
print("first")
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.read(reader, 1)
    print("third")
    os._exit(0)
print("second", file=sys.stderr)
os.write(writer, b"x")
os.waitpid(child, 0)
"""
    assert shown_of(program) == "first\nsecond\nthird\n"


@pytest.mark.parametrize("writers", ["children", "threads"])
def test_no_mark_is_torn_where_several_write_lines_longer_than_a_page(shown_of: ShownOf, writers: str) -> None:
    program = """
import random, threading
def write(who):
    for number in range(100):
        print(chr(65 + who) * random.randrange(4060, 4110), file=(sys.stdout, sys.stderr)[number % 2])
if sys.argv[1] == "children":
    for who in range(6):
        if os.fork() == 0:
            write(who)
            os._exit(0)
    for who in range(6):
        os.wait()
else:
    threads = [threading.Thread(target=write, args=(who,)) for who in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
    text = shown_of(program, writers)
    assert set(text) <= set("ABCDEF\n")
    assert text.count("\n") == 600


def test_a_stream_that_does_not_block_drops_what_the_pipe_does_not_take(shown_of: ShownOf) -> None:
    program = """
os.set_blocking(1, False)
os.set_blocking(2, False)
for number in range(400):
    print("x" * 60_000, file=(sys.stdout, sys.stderr)[number % 2])
"""
    shown = shown_of(program)
    assert shown.startswith("x")
    assert set(shown) <= set("x\n"), "without a line end where the reader has had no turn"


def test_what_may_have_begun_a_mark_is_shown_at_the_end(shown_of: ShownOf) -> None:
    assert shown_of(r'os.write(1, b"end\0")') == "end\0"


def test_a_mark_of_a_time_to_come_holds_nothing_back(shown_of: ShownOf) -> None:
    program = r"""
from ddplaunch.protocol.write_times import mark
os.write(1, mark(2**63) + b"x\n")
print("y")
"""
    assert shown_of(program) == "x\ny\n"


def test_a_file_of_the_script_has_no_marks(shown_of: ShownOf, tmp_path: Path) -> None:
    program = """
print("first", file=sys.stderr)
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)
print("redirected")
print("second", file=sys.stderr)
print("again")
os.close(1)
try:
    print("third", file=sys.stderr)
    print("closed")
except OSError as error:
    print(error.errno, file=sys.stderr)
"""
    assert shown_of(program, str(tmp_path / "file")) == "first\nsecond\nthird\n9\n"
    assert (tmp_path / "file").read_text() == "redirected\nagain\n"


def test_a_process_of_other_files_marks_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        program = "print(1)\nprint(2, file=sys.stderr)\nprint(3)\nassert type(sys.stdout.buffer).__name__ == 'FileIO'"
        command = [sys.executable, "-u", "-c", PRELUDE + program]
        assert subprocess.run(command, stdout=file, stderr=file, timeout=60).returncode == 0
    assert (tmp_path / "file").read_text() == "1\n2\n3\n"
