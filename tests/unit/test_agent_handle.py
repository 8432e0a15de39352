"""What a handle does with the records of its agent: large ones are decoded one at a time, and others need not wait."""

from __future__ import annotations

import importlib
import io
import threading

import pytest

from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Notice, Pong
from ddplaunch.transport import handle
from ddplaunch.transport.handle import AgentHandle, discard_output
from tests.support.processes import wait_until

LARGE = Notice("x" * handle._LARGE_BYTES, 0)


class Reader(AgentHandle):
    """A handle whose agent has written ``records``; they are read in a thread."""

    def __init__(self, *records: object) -> None:
        self.read: list[object] = []
        super().__init__("on gpu0", self.read.append, discard_output)
        lines = (record if isinstance(record, bytes) else wire.encode(record) for record in records)
        stream = io.BytesIO(b"".join(lines))
        self.thread = threading.Thread(target=self._deliver_records, args=(stream,))
        self.thread.start()

    def wake(self) -> None: ...

    def kill(self) -> None: ...

    def close(self, timeout_s: float = 5.0) -> int:
        return 0


def test_a_large_record_waits_for_another_one_and_a_small_one_does_not() -> None:
    with handle._decodes_large:
        large, small = Reader(Pong(1.0), LARGE, Pong(2.0)), Reader(Pong(3.0))
        small.thread.join()
        assert small.read == [Pong(3.0)]
        wait_until(lambda: large.heard_at == float("inf"))
        assert large.read == [Pong(1.0)]
    large.thread.join()
    assert large.read == [Pong(1.0), LARGE, Pong(2.0)]
    assert 0.0 < large.heard_at < float("inf")


def test_a_large_record_that_cannot_be_decoded_delays_nobody() -> None:
    reader = Reader(LARGE.text.encode() + b"\n")
    reader.thread.join()
    assert isinstance(reader.read[0], Notice)
    assert not handle._decodes_large.locked()
    assert reader.heard_at < float("inf")


def test_an_unexpected_error_of_the_thread_that_reads_ends_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a module that an upgrade of the package has removed: the run must not wait for ever."""
    monkeypatch.setattr(wire, "read_record", lambda *_: importlib.import_module("ddplaunch.gone"))
    reader = Reader()
    reader.thread.join()
    [notice] = reader.read
    assert isinstance(notice, Notice)
    assert notice.text.endswith("was given up: ModuleNotFoundError: No module named 'ddplaunch.gone'")
