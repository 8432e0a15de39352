"""What an agent finds out about a failed collective: from files that workers left, and from those that still run."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.workers.worker import Worker
from ddplaunch.features.hangs import worker_records
from ddplaunch.features.hangs.evidence import FailureEvidence
from ddplaunch.features.hangs.examiner import Answer
from ddplaunch.features.hangs.stack_dumps import StackDumps
from ddplaunch.protocol.results import WorkerError, WorkerExit
from tests.support.hangs import DATA

DUMP = json.loads(DATA.read_text())["sleep"]["0"]["dump"]
LOST = "RuntimeError: Connection closed by peer"
TIMED_OUT = "RuntimeError: Timed out waiting 3000ms for recv operation to complete"


class Node:
    """Two workers: rank 0 has ended, rank 1 runs and would answer."""

    def __init__(self, folder: Path, message: str = TIMED_OUT, returncode: int | None = 1) -> None:
        self.workers = [Worker(rank, rank, folder / str(rank), pid=100 + rank) for rank in (0, 1)]
        self.asked_s = self.waited_s = 0.0
        self.message, self.workers[0].returncode = message, returncode
        for worker in self.workers:
            assert worker.worker_dir
            worker.worker_dir.mkdir()
        if message:
            assert self.workers[0].error_file
            self.workers[0].error_file.write_text(json.dumps({"message": {"message": message}}))
        self.group: Any = SimpleNamespace(
            workers=self.workers,
            host="node1",
            all_ended=False,
            pids_by_local_rank=lambda: {1: 101},
        )
        examiner: Any = SimpleNamespace(is_connected=lambda pid: True, ask=self._ask)
        self.evidence = FailureEvidence(
            self.group, [StackDumps(worker) for worker in self.workers], examiner, lambda call: call()
        )

    def _ask(self, pids: object, request: bytes, timeout_s: float) -> dict[int, Answer]:
        assert (list(pids), request) == ([101], worker_records.RECORD)  # type: ignore[call-overload]
        self.asked_s = timeout_s
        return {101: Answer({}, json.dumps(DUMP).encode())}

    def take(self) -> None:
        def wait(done: Callable[[], bool], end: Callable[[], float]) -> bool:
            self.waited_s = end() - time.monotonic()
            while not done():
                pass
            return True

        self.evidence.take(wait)

    def leave(self, name: str, data: bytes) -> None:
        assert self.workers[0].worker_dir
        (self.workers[0].worker_dir / name).write_bytes(data)

    def found(self) -> dict[int, Any]:
        error = WorkerError(self.message, "", 1.0) if self.message else None
        codes = (self.workers[0].returncode or 0, -15)
        ends = [
            WorkerExit(rank, rank, "node1", 100 + rank, codes[rank], bool(rank), 1.0, 1.0, None if rank else error)
            for rank in (0, 1)
        ]
        return {each.rank: each for each in self.evidence.of_workers(ends)}


@pytest.mark.parametrize(
    ("message", "returncode", "limit_s"),
    [
        (TIMED_OUT, 1, 0.5),
        ("", -6, 0.5),
        (LOST, 1, 0.02),
        ("KeyError: 'timed out'", 1, 0.02),
        ("", -9, 0.02),
        ("", None, 0.3),
    ],
    ids=["timed out", "aborted", "peer gone", "other exception", "killed", "another node has failed"],
)
def test_a_stop_waits_for_answers_as_long_as_they_are_needed(
    tmp_path: Path, message: str, returncode: int | None, limit_s: float
) -> None:
    node = Node(tmp_path, message, returncode)
    node.take()
    assert node.waited_s == pytest.approx(limit_s, abs=0.015)
    assert node.asked_s == 0.5, "what is answered during the stop also counts"


def test_the_file_of_the_watchdog_is_read(tmp_path: Path) -> None:
    node = Node(tmp_path, "", -6)
    node.leave("flight_record_rank_0", pickle.dumps(DUMP, protocol=2))
    assert node.found()[0].flight_record.made.all[-1].number == 4


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"flight_record": {"entries": 3}}', b"\xff" * 100])
def test_files_with_nonsense_are_as_none(tmp_path: Path, data: bytes) -> None:
    node = Node(tmp_path)
    node.leave(worker_records.RECORD_FILE, data)
    node.leave("flight_record_rank_0", data)
    assert node.found() == {}


def test_only_a_worker_that_was_asked_is_said_to_run(tmp_path: Path) -> None:
    node = Node(tmp_path)
    facts = {
        worker_records.PENDING: {"function": "all_reduce", "peer": None, "group": ""},
        worker_records.FLIGHT_RECORD: DUMP,
    }
    node.leave(worker_records.RECORD_FILE, json.dumps(facts).encode())
    node.take()
    assert {rank: each.is_running for rank, each in node.found().items()} == {0: False, 1: True}
