"""When a job counts as hung: all of its nodes are silent, or gone, in the same attempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.events import AttemptFailure, OutputResumed
from ddplaunch.agent.workers import hang_detector
from ddplaunch.agent.workers.hang_detector import HangDetector
from ddplaunch.agent.workers.output import Stream
from ddplaunch.launcher.attempts import is_hung
from ddplaunch.protocol.launcher_agent import AbortHungAttempt, Output, WorkerActivity

SILENT, HEARD, GONE = (WorkerActivity(0, state) for state in ("idle", "active", "finished"))


@pytest.mark.parametrize(
    ("told", "hangs"),
    [
        ([(0, SILENT), (1, SILENT)], True),
        ([(1, GONE), (0, SILENT)], True),
        ([(0, SILENT), (1, GONE)], True),
        ([(0, SILENT)], False),
        ([(0, SILENT), (0, HEARD), (1, SILENT)], False),
        ([(0, SILENT), (0, HEARD), (1, SILENT), (0, SILENT)], True),
        ([(0, GONE), (1, GONE)], False),
        ([(0, SILENT), (1, WorkerActivity(1, "idle"))], False),
        ([(0, SILENT), (2, SILENT)], False),
    ],
)
def test_all_that_take_part_must_be_silent_in_one_attempt(told: list[tuple[int, WorkerActivity]], hangs: bool) -> None:
    activity: dict[int, WorkerActivity] = {}
    found = []
    for index, event in told:
        activity[index] = event
        found.append(is_hung(activity, [0, 1], event.attempt))
    assert found == [False] * (len(told) - 1) + [hangs]


class Watched:
    """A ``Silence`` with one stream, whose events come as the test says: each wait ends by one of ``waits``."""

    def __init__(self, limit_s: float | None) -> None:
        self.stream = Stream(Output("node1", 0, 0, "stdout", 0), send=None, log=None)
        self.group = SimpleNamespace(attempt=0, streams=(self.stream,), all_ended=True, request_stacks=lambda: None)
        self.told: list[str] = []
        self.posted: list[Any] = []
        self.silence = HangDetector(
            limit_s, self.group, lambda record: self.told.append(record.state), self.posted.append
        )  # type: ignore[arg-type]

    def watch(self, *waits: Any) -> None:
        """Each of ``waits`` is what happens while it lasts, called with its deadline; the last one's end is the end."""
        steps = list(waits)

        def wait(_done: object, deadline: Any) -> bool:
            if not steps:  # Those that hang have a moment more.
                return True
            steps.pop(0)(deadline())
            return not steps

        self.silence.watch(wait, lambda: False)


def test_without_a_limit_nothing_is_told() -> None:
    deadlines: list[float] = []
    watched = Watched(None)
    watched.watch(deadlines.append)
    assert (watched.told, deadlines) == ([], [float("inf")])


def test_silence_is_told_once_and_so_is_its_end() -> None:
    watched = Watched(0.0)
    deadlines: list[float] = []

    def write(deadline: float) -> None:
        deadlines.append(deadline)
        for _ in range(2):
            watched.stream.write(b"line\n")
        assert watched.posted == [OutputResumed(0)]
        watched.silence.handle_event(watched.posted.pop())

    watched.watch(deadlines.append, write, deadlines.append)
    assert watched.told == ["idle", "active", "idle", "finished"]
    assert deadlines[1:] == [float("inf"), float("inf")]


def test_what_is_written_meanwhile_puts_it_off() -> None:
    watched = Watched(1000.0)
    deadlines: list[float] = []

    def write(deadline: float) -> None:
        deadlines.append(deadline)
        watched.stream.write(b"line\n")

    watched.watch(write, deadlines.append)
    assert deadlines[1] > deadlines[0]
    assert watched.told == ["finished"]


def test_a_job_that_was_suspended_as_a_whole_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(10.0)
    deadlines: list[float] = []

    def suspended(deadline: float) -> None:
        monkeypatch.setattr(hang_detector.time, "monotonic", lambda: deadline + 1000)

    watched.watch(suspended, deadlines.append)
    assert watched.told == ["finished"]
    assert deadlines[0] > 1000


def test_the_end_of_a_job_that_hangs_is_said_while_workers_are_there() -> None:
    watched = Watched(1.0)
    text = "no worker has written anything for 1 s: the job hangs"
    failures: list[AttemptFailure | None] = []
    watched.watch(lambda _deadline: failures.extend(watched.silence.handle_event(AbortHungAttempt(n)) for n in (7, 0)))
    assert failures == [None, AttemptFailure(text)]
    assert watched.silence.is_hung
    done = Watched(1.0)
    done.watch(lambda _deadline: None)
    assert done.silence.handle_event(AbortHungAttempt(0)) is None
    assert not done.silence.is_hung
