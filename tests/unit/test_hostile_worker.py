"""A worker that says or writes anything: the records of its agent are valid, and no node is given up for them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.workers.exit_details import read_error_file
from ddplaunch.agent.workers.worker import Worker
from ddplaunch.features.hangs import flight_record, worker_records
from ddplaunch.features.hangs.evidence import FailureEvidence, of_group, take_samples
from ddplaunch.features.hangs.examiner import Answer
from ddplaunch.features.hangs.records import RankEvidence, WorkersExamined
from ddplaunch.features.hangs.stack_dumps import StackDumps
from ddplaunch.features.slow_ranks.agent import SlowRanksPart
from ddplaunch.features.slow_ranks.records import CollectivesSampled
from ddplaunch.protocol import environment, wire
from ddplaunch.protocol.launcher_agent import AttemptEnded
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from tests.support.hangs import DATA

PID = os.getpid()
DUMP = json.loads(DATA.read_text())["sleep"]["0"]["dump"]
FACTS = {
    worker_records.CPU_S: 1.0,
    worker_records.GROUPS: {"0": ["default_pg", [0, 1]]},
    worker_records.PENDING: ["recv", 1, "0"],
}
ERROR = {
    "message": {
        "message": "RuntimeError: Connection closed by peer",
        "extraInfo": {
            "py_callstack": 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nRuntimeError: x\n',
            "timestamp": "1",
        },
    }
}
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 1 << 31, 1 << 62, 1 << 64, 10**30, 1e308, -1e308, float("nan"), float("inf"), 0, 1, 2.5),
    *("", "x" * 9000, "\x1b]0;evil\x07", "a\xa0b", "\u202e", "\ud83d", "\udcff", "a\nb", [], {}, [[]], {"a": 1}),
    *([*range(20_000)], [*range(0, 6000, 2), 1], [7, 3] * 2000, "9" * 4000),
)


class Mutation:
    """Changes JSON at random places: values, names, what is repeated and what is missing."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def of(self, value: Any, share: float = 0.05) -> Any:
        if self.random.random() < share and not isinstance(value, dict):
            return self.random.choice(WRONG)
        if isinstance(value, dict):
            return {
                self.random.choice((key, key, key, "\x1b")) if self.random.random() < share else key: self.of(
                    item, share
                )
                for key, item in value.items()
                if self.random.random() > share / 5
            }
        if isinstance(value, list):
            items = [self.of(item, share) for item in value]
            return items * self.random.choice((1, 1, 1, 1, 5)) if len(items) < 50 else items
        if isinstance(value, str) and self.random.random() < share:
            return value.replace(
                self.random.choice((".", ",", " ")), self.random.choice(("\xa0.", "\x1b", "\ud83d", "\n"))
            )
        return value

    def text(self, value: Any, *shares: float) -> bytes:
        """Sometimes cut off."""
        data = json.dumps(self.of(value, self.random.choice(shares))).encode()
        return data[: self.random.randrange(len(data))] if self.random.random() < 0.1 else data


def assert_is_accepted(record: Any) -> None:
    wire.decode(wire.encode(record), (type(record), AttemptEnded))


class Job:
    """Two workers: rank 0 has ended and left its files, rank 1 runs and answers."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.mutation = Mutation(seed)
        self.workers = [Worker(rank, rank, folder / str(rank), pid=PID) for rank in (0, 1)]
        self.workers[0].returncode = 1
        for worker in self.workers:
            assert worker.worker_dir
            worker.worker_dir.mkdir()
            for name in ("stacks.txt", worker_records.RECORD_FILE, f"{environment.FLIGHT_RECORD_FILE}{worker.rank}"):
                (worker.worker_dir / name).write_bytes(
                    self.mutation.text({**FACTS, "flight_record": DUMP}, 0.0, 0.01, 0.1)
                )
            if worker.error_file:
                worker.error_file.write_bytes(self.mutation.text(ERROR, 0.2, 0.6))
        self.group: Any = SimpleNamespace(
            workers=self.workers,
            host="here",
            all_ended=False,
            attempt=0,
            debugged_at=0,
            pids_by_local_rank=lambda: {1: PID},
        )
        self.examiner: Any = SimpleNamespace(is_connected=lambda pid: True, ask=self.ask)

    def ask(self, pids: Any, request: bytes, timeout_s: float = 1.0) -> dict[int, Answer]:
        facts = self.mutation.of(FACTS, self.mutation.random.choice((0.2, 0.5)))
        return {
            pid: Answer(facts if isinstance(facts, dict) else {}, self.mutation.text(DUMP, 0.0, 0.01, 0.1))
            for pid in pids
        }

    def exits(self) -> tuple[WorkerExit, ...]:
        facts: dict[str, Any] = {"stopped": False, "time_s": 1.0, "duration_s": 1.0}
        errors = [read_error_file(worker.error_file) if worker.error_file else None for worker in self.workers]
        return tuple(WorkerExit(rank, rank, "here", 1, 1, error=error, **facts) for rank, error in enumerate(errors))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_worker_says_its_node_is_not_given_up(seed: int, tmp_path: Path) -> None:
    job = Job(tmp_path, seed)
    first = take_samples(job.examiner, {1: PID}, {}, reads_all=True)
    second = take_samples(job.examiner, {1: PID}, first, reads_all=True)
    assert_is_accepted(WorkersExamined(0, 1, tuple(of_group(job.group, second, first))))


def test_a_process_group_may_have_any_ranks() -> None:
    """Also so many that they, or the text of them, are beyond the limit of a field."""
    uneven = [*range(0, 200_000, 2), 1]
    for ranks in ([*range(100_000)], [7, 3] * 40_000, uneven, [*range(1 << 16)], [7, 3] * (1 << 15)):
        record = flight_record.parse(json.dumps(DUMP).encode(), {"0": ("all", ranks)})
        evidence = RankEvidence(rank=0, local_rank=0, host="here", pid=PID, flight_record=record)
        assert_is_accepted(WorkersExamined(0, 1, (evidence,)))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_worker_leaves_its_node_is_not_given_up(seed: int, tmp_path: Path) -> None:
    job = Job(tmp_path, seed)
    evidence = FailureEvidence(job.group, [*map(StackDumps, job.workers)], job.examiner, lambda call: call())
    evidence._answers = {1: job.ask([PID], worker_records.RECORD)[PID]}
    exits = job.exits()
    examined = WorkersExamined(0, 0, evidence.of_workers(exits))
    assert_is_accepted(AttemptEnded(AttemptResult(0, "failed", exits, 1.0), (examined,)))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_worker_says_of_its_collectives_its_node_is_not_given_up(seed: int, tmp_path: Path) -> None:
    job, part = Job(tmp_path, seed), SlowRanksPart.__new__(SlowRanksPart)
    part._examiner, part._newest, part._loads = job.examiner, 1000, {}
    assert_is_accepted(part._read(CollectivesSampled(0, 0, "here"), job.workers, ()))
