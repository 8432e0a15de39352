"""From the pipe to the file and the outbox: every byte in the file, whole lines in order, what is lost is counted."""

from __future__ import annotations

import itertools
import os
import re
import resource
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.agent.launcher_channel import Outbox
from ddplaunch.agent.workers import pump as pumping
from ddplaunch.agent.workers.output import LineBuffer, LogFile, Stream
from ddplaunch.agent.workers.pump import Pump
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import FROM_AGENT, Notice, Output, Pong
from ddplaunch.system.linux import output_pipe
from tests.support import golden
from tests.support.processes import wait_until

HEADER = Output("node", 3, 1, "stdout", 0)


class Received:
    """Stands for the outbox: takes output, or refuses it while ``refuses``."""

    def __init__(self) -> None:
        self.items: list[tuple[Output, bytes]] = []
        self.refuses = False

    def __call__(self, header: Output, data: bytes) -> bool:
        if self.refuses and data:
            return False
        self.items.append((header, data))
        return True

    @property
    def chunks(self) -> list[bytes]:
        return [data for _, data in self.items]

    @property
    def data(self) -> bytes:
        return b"".join(self.chunks)


def stream(send: Callable[[Output, bytes], bool] | None, log: LogFile | None = None) -> Stream:
    return Stream(HEADER, send, log)


def write(to: Stream, data: bytes) -> None:
    to.keep(data)
    to.show(data)


# Whole lines.


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b"\r", b"\xff"])), st.data())
def test_no_byte_is_lost_or_moved_wherever_the_reads_cut(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    buffer, taken, start = LineBuffer(1 << 20), b"", 0
    while start < len(whole):
        end = data.draw(st.integers(start + 1, len(whole)))
        chunk = buffer.add(whole[start:end])
        assert chunk == b"" or chunk.endswith((b"\n", b"\r"))
        taken, start = taken + chunk, end
    rest = buffer.take_rest()
    assert taken + rest == whole
    assert not re.search(rb"[\r\n][^\r\n]*[\r\n]", rest.removesuffix(b"\r\n")), "only an unfinished line is held"


def test_what_is_shown_of_lines_that_come_in_pieces() -> None:
    """A question is the limit of a line, and the pieces."""

    def shown(question: str) -> list[bytes]:
        limit, _, pieces = question.partition(" ")
        buffer = LineBuffer(int(limit))
        return [buffer.add(piece.encode()) for piece in pieces.split("|")]

    golden.check_answers("line_pieces", shown)


def test_an_unfinished_line_is_due_when_it_is_quiet_or_has_grown_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    buffer = LineBuffer(100)
    assert buffer.deadline() is None
    buffer.add(b".")
    first = buffer.deadline()
    assert first is not None
    assert now < first <= now + 0.2
    for _ in range(50):
        now += 0.05
        buffer.add(b".")
    last = buffer.deadline()
    assert last is not None
    assert last <= 101.0, "dots that never stop are shown all the same"


# A stream.


def test_a_stream_kept_off_the_console_still_has_its_file_and_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    it = stream(None, LogFile(path, pytest.fail))
    write(it, b"x\n" * 100_000)
    assert it.partial_deadline() is None
    it.close()
    assert path.stat().st_size == 200_000
    assert len(it.tail) == 16 << 10


def test_filtered_lines_are_copied_whole_even_if_the_console_showed_a_part_early(tmp_path: Path) -> None:
    path, received = tmp_path / "filtered_stdout.log", Received()
    it = Stream(HEADER, received, None, (b"loss",), LogFile(path, pytest.fail), b"[default1]:")
    write(it, b"lo")
    it.flush_partial()
    write(it, b"ss 1\r\nother\n")
    write(it, b"last loss")
    it.close()
    assert received.chunks == [b"lo", b"ss 1\r\nother\n", b"last loss"]
    assert path.read_bytes() == b"[default1]:loss 1\n[default1]:last loss\n"


class Streams:
    """Both streams of a worker, as a pump shows them. The methods are the steps of a story.

    Pieces are ``out:a|err:b``, with a backslash and n for a line end.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self._received = Received()
        self._streams = {
            "out": stream(self._received),
            "err": Stream(replace(HEADER, stream="stderr"), self._received, None),
        }

    def _tell(self) -> None:
        """Fields of the header that are not as usual, and the bytes."""
        for header, data in self._received.items:
            facts = {"lost_lines": header.lost_lines, "goes_on": header.goes_on, "runs": header.runs}
            told = "".join(f", {name} {value}" for name, value in facts.items() if value)
            self.said.append(f"{header.stream} {data.decode()!r}{told}")
        self._received.items.clear()

    def write(self, pieces: str) -> None:
        """One piece after the other."""
        for piece in pieces.split("|"):
            self.read(piece)

    def read(self, pieces: str) -> None:
        """All at one look of the pump."""
        named = (piece.partition(":") for piece in pieces.split("|"))
        pumping._show([(self._streams[name], text.replace("\\n", "\n").encode()) for name, _, text in named])
        self._tell()

    def quiet(self) -> None:
        """So long that the unfinished line of stdout is shown."""
        self._streams["out"].flush_partial()
        self._tell()

    def refuse(self) -> None:
        self._received.refuses = True

    def take(self) -> None:
        self._received.refuses = False

    def close(self) -> None:
        self._streams["out"].close()
        self._tell()


def test_what_the_launcher_gets_and_what_it_has_refused_is_counted() -> None:
    golden.check_pages("shown_streams", lambda story: golden.play(Streams(), story.partition(": ")[2]))


# Log files.


def test_where_there_is_room_again_the_file_says_what_is_missing(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    path, said = tmp_path / "stdout.log", []
    log = LogFile(path, said.append)
    small_files(10)
    log.write(b"12345678\nabc\n")
    log.write(b"def\n")
    small_files(resource.RLIM_INFINITY)
    log.write(b"ghi\n")
    log.write(b"jkl\n")
    log.close()
    log.write(b"late")
    assert path.read_bytes() == b"12345678\na\n... 7 bytes could not be written here\nghi\njkl\n"
    assert said == [f"{path}: File too large"]


@pytest.mark.parametrize("obstacle", ["a missing folder", "a folder", "a link"])
def test_a_file_that_cannot_be_opened_is_reported_once(tmp_path: Path, obstacle: str) -> None:
    path, said = tmp_path / "log" / "stdout.log", []
    if obstacle != "a missing folder":
        path.parent.mkdir()
        if obstacle == "a folder":
            path.mkdir()
        else:
            path.symlink_to(tmp_path / "elsewhere")
    log = LogFile(path, said.append)
    log.write(b"x")
    log.close()
    assert len(said) == 1
    assert str(path) in said[0]
    assert not (tmp_path / "elsewhere").exists()


# The outbox.


class Launcher:
    """Reads what an outbox writes, when told to."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._stream = os.fdopen(reader, "rb")
        self.outbox = Outbox(writer)

    def receive(self, record: object = None) -> list[tuple[object, bytes]]:
        """What has been sent, up to ``record``; without one, up to now."""
        last = record or Notice("the end")
        if record is None:
            self.outbox.send(last)
        received = [self.receive_one()]
        while received[-1][0] != last:
            received.append(self.receive_one())
        return received[:-1]

    def receive_one(self) -> tuple[object, bytes]:
        received = wire.read_record(self._stream, FROM_AGENT)
        assert received
        return received

    def leave(self) -> None:
        self._stream.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.leave()


def output_bytes(received: list[tuple[object, bytes]]) -> int:
    return sum(len(data) for _, data in received)


def fill(box: Outbox, nbytes: int) -> int:
    """Send that much in lines of 1,024 bytes, 64 at a time; returns how many lines were refused."""
    chunk = (b"x" * 1023 + b"\n") * 64
    header = Output("node", 3, 1, "stdout", len(chunk))
    return sum(64 for _ in range(nbytes // len(chunk)) if not box.send_output(header, chunk))


def test_records_overtake_output_and_keep_their_order(launcher: Launcher) -> None:
    fill(launcher.outbox, 4 << 20)
    for number in range(3):
        launcher.outbox.send(Notice(str(number)))
    received = launcher.receive(Notice("2"))
    assert [record for record, _ in received if isinstance(record, Notice)] == [Notice("0"), Notice("1")]
    before = output_bytes(received)
    assert before < 4 << 20
    threading.Thread(target=launcher.outbox.drain, args=(60,)).start()
    behind = 0
    while before + behind < 4 << 20:
        behind += len(launcher.receive_one()[1])


def test_what_cannot_be_sent_by_the_end_is_counted(launcher: Launcher) -> None:
    fill(launcher.outbox, 6 << 20)
    launcher.outbox.send_output(Output("node", 4, 2, "stderr", 4, lost_lines=10), b"half")
    for piece in (b" of it", b" goes on\nnext"):
        launcher.outbox.send_output(Output("node", 4, 2, "stderr", len(piece), goes_on=True), piece)
    launcher.outbox.drain(0.1)
    received = launcher.receive()
    shown = output_bytes(received) // 1024
    lost = {
        record.rank: record.lost_lines for record, _ in received if isinstance(record, Output) and record.lost_lines
    }
    assert lost == {3: (6 << 10) - shown, 4: 12}


def test_a_record_of_the_meantime_overtakes_what_is_drained_slowly(launcher: Launcher) -> None:
    """An agent that drains its output for seconds answers all the same."""
    box = launcher.outbox
    fill(box, 4 << 20)
    asked = threading.Event()
    attend = lambda: asked.is_set() and (asked.clear(), box.send(Pong()))  # noqa: E731
    draining = threading.Thread(target=box.drain, args=(60, attend))
    draining.start()
    before = output_bytes([launcher.receive_one() for _ in range(4)])
    asked.set()
    wait_until(lambda: not asked.is_set())
    before += output_bytes(launcher.receive(Pong()))
    assert before < 1 << 20, "no more than was on the way"
    while before < 4 << 20:
        before += len(launcher.receive_one()[1])
    draining.join(60)


def test_a_large_piece_that_moves_slowly_is_not_given_up() -> None:
    reader, writer = os.pipe()
    box, read = Outbox(writer), bytearray()
    line = b"x" * (384 << 10) + b"\n"
    box.send_output(replace(HEADER, nbytes=len(line)), line)
    box.drain(1.0, lambda: read.extend(os.read(reader, 16 << 10)))
    box.send(Notice("the end"))
    while b"the end" not in read:
        read.extend(os.read(reader, 1 << 20))
    os.close(reader)
    assert line in read


def test_long_output_goes_in_pieces_of_whole_lines(launcher: Launcher) -> None:
    text = b"".join(b"%07d\n" % number for number in range(40_000))
    launcher.outbox.send_output(replace(HEADER, nbytes=len(text), lost_lines=3), text)
    threading.Thread(target=launcher.outbox.drain, args=(60,)).start()
    received = [launcher.receive_one()]
    while output_bytes(received) < len(text):
        received.append(launcher.receive_one())
    pieces = [data for _, data in received]
    assert b"".join(pieces) == text
    assert all(len(piece) <= 64 << 10 and piece.endswith(b"\n") for piece in pieces)
    assert [header.lost_lines for header, _ in received if isinstance(header, Output)] == [3] + [0] * (len(pieces) - 1)


def test_a_launcher_that_is_gone_ends_all_waiting(launcher: Launcher) -> None:
    launcher.leave()
    fill(launcher.outbox, 1 << 20)
    launcher.outbox.drain(60)
    assert not launcher.outbox.send_output(HEADER, b"x\n")


# Pumps.


def test_last_lines_that_the_launcher_takes_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pumping, "_IDLE_S", 0.01)
    received, waits, is_taken = Received(), itertools.count(), threading.Event()

    def late(header: Output, data: bytes) -> bool:
        return is_taken.wait(60) and received(header, data)

    reader, writer = output_pipe()
    pump = Pump({reader: stream(late)}, "test")
    join = pump._thread.join

    def wait(timeout_s: float) -> None:
        join(timeout_s)
        if next(waits) == 5:
            is_taken.set()

    monkeypatch.setattr(pump._thread, "join", wait)
    os.write(writer, b"last\n" * 1000)
    os.close(writer)
    now = time.monotonic()
    assert pump.join(now - pumping._BUSY_S, now)
    assert received.data == b"last\n" * 1000


@pytest.mark.parametrize(
    ("is_shown", "moves", "limit_s"),
    [(True, False, 0.25), (True, True, 5.0), (False, False, 5.0), (False, True, 30.0)],
    ids=["silent stranger", "busy stranger", "stuck launcher", "slow launcher"],
)
def test_how_long_the_end_of_an_attempt_waits_for_a_pump(
    is_shown: bool, moves: bool, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all that the worker has written is shown, only another process keeps its pipe open."""
    reader, writer = output_pipe()
    os.close(writer)
    pump, now = Pump({reader: stream(Received())}, "test"), 100.0
    pump._thread.join()

    def wait(duration_s: float) -> None:
        nonlocal now
        now += duration_s
        pump._steps += moves

    monkeypatch.setattr(pump, "_thread", SimpleNamespace(is_alive=lambda: True, join=wait))
    monkeypatch.setattr(pumping, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(pump, "_shown_ns", 101e9 if is_shown else 0)
    assert not pump.join(100.0, 100.0)
    assert now == 100.0 + limit_s


def test_a_pump_between_two_reads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends after its last line was noticed, and before it is read; the thread does not know of the end."""
    is_noticed, has_ended, is_read, goes_on = (threading.Event() for _ in range(4))
    make_poll, sleep = select.poll, time.sleep

    class Poll:
        def __init__(self) -> None:
            self._poll = make_poll()
            self.register, self.unregister = self._poll.register, self._poll.unregister

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            events = self._poll.poll(timeout_ms)
            is_noticed.set()
            has_ended.wait(60)
            return events

    def hold(duration_s: float) -> None:
        if threading.current_thread() is not pump._thread:
            sleep(duration_s)
            return
        is_read.set()
        goes_on.wait(60)

    monkeypatch.setattr(select, "poll", Poll)
    monkeypatch.setattr(time, "sleep", hold)
    received, waits, (reader, writer) = Received(), itertools.count(), output_pipe()
    os.write(writer, b"last words, without a newline")
    pump = Pump({reader: stream(received)}, "test")
    assert is_noticed.wait(60)
    os.close(writer)
    ended_at = time.monotonic()
    has_ended.set()
    assert is_read.wait(60)
    join = pump._thread.join

    def wait(timeout_s: float) -> None:
        join(timeout_s and 0.01)
        if next(waits) == 3:
            goes_on.set()

    monkeypatch.setattr(pump._thread, "join", wait)
    assert pump.join(ended_at - pumping._BUSY_S, ended_at)
    assert received.data == b"last words, without a newline"


def test_what_was_written_before_is_waited_for_wherever_it_is() -> None:
    """In the pipe, or in the hands of the pump."""
    sends, sent, goes_on = threading.Event(), list[bytes](), threading.Event()

    def send(_header: Output, data: bytes) -> bool:
        sends.set()
        assert goes_on.wait(60)
        sent.append(data)
        return True

    reader, writer = output_pipe()
    pump = Pump({reader: stream(send)}, "test")
    pump.wait_until_sent(60)
    os.write(writer, b"one\n")
    assert sends.wait(60)
    pump.wait_until_sent(0.1)
    assert not sent, "the test is in time"
    os.write(writer, b"two\n")
    threading.Timer(0.2, goes_on.set).start()
    pump.wait_until_sent(60)
    assert b"".join(sent) == b"one\ntwo\n"
    os.close(writer)
    assert pump.join(time.monotonic() + 60, time.monotonic())


def test_the_pump_of_a_busy_stranger_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pumping, "_BUSY_S", 0.5)
    monkeypatch.setattr(pumping, "_LAST_S", 1000.0)
    reader, writer = output_pipe()
    pump = Pump({reader: stream(Received())}, "test")
    stop = threading.Event()

    def chatter() -> None:
        for _ in range(500):
            os.write(writer, b"still here\n")
            if stop.wait(0.01):
                break
        os.close(writer)

    thread = threading.Thread(target=chatter)
    thread.start()
    assert not pump.join(time.monotonic(), time.monotonic())
    stop.set()
    thread.join()
    assert pump.join(time.monotonic() + 60, time.monotonic())
