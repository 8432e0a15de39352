"""When a job counts as hung: all of its nodes are silent, or gone, in the same attempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent import silence
from ddplaunch.agent.events import WorkersHeard
from ddplaunch.agent.output import Stream
from ddplaunch.agent.silence import Silence
from ddplaunch.hang import EndHung, WorkersAre
from ddplaunch.launcher.hangs import Hangs
from ddplaunch.records import Output

SILENT, HEARD, GONE = (WorkersAre(0, state) for state in ("silent", "heard", "gone"))


@pytest.mark.parametrize(
    ("told", "is_hung"),
    [
        ([(0, SILENT), (1, SILENT)], True),
        ([(1, GONE), (0, SILENT)], True),
        ([(0, SILENT), (1, GONE)], True),
        ([(0, SILENT)], False),
        ([(0, SILENT), (0, HEARD), (1, SILENT)], False),
        ([(0, SILENT), (0, HEARD), (1, SILENT), (0, SILENT)], True),
        ([(0, GONE), (1, GONE)], False),
        ([(0, SILENT), (1, WorkersAre(1, "silent"))], False),
        ([(0, SILENT), (2, SILENT)], False),
    ],
)
def test_all_that_take_part_must_be_silent_in_one_attempt(told: list[tuple[int, WorkersAre]], is_hung: bool) -> None:
    sent: list[object] = []
    hangs = Hangs(SimpleNamespace(seats=[0, 1], send=sent.append))  # type: ignore[arg-type]
    for index, event in told:
        hangs.hear(SimpleNamespace(index=index), event)  # type: ignore[arg-type]
    assert sent == ([EndHung(0)] if is_hung else [])


class Watched:
    """A ``Silence`` with one stream, whose events come as the test says: each wait ends by one of ``waits``."""

    def __init__(self, limit_s: float | None) -> None:
        self.stream = Stream(Output("node1", 0, 0, "stdout", 0), send=None, log=None)
        self.group = SimpleNamespace(attempt=0, streams=(self.stream,), all_ended=True, write_stacks=lambda: None)
        self.told: list[str] = []
        self.posted: list[Any] = []
        self.silence = Silence(limit_s, self.group, lambda record: self.told.append(record.state), self.posted.append)  # type: ignore[arg-type]

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
            watched.stream.take(b"line\n")
        assert watched.posted == [WorkersHeard(0)]
        watched.silence.hear(watched.posted.pop())

    watched.watch(deadlines.append, write, deadlines.append)
    assert watched.told == ["silent", "heard", "silent", "gone"]
    assert deadlines[1:] == [float("inf"), float("inf")]


def test_what_is_written_meanwhile_puts_it_off() -> None:
    watched = Watched(1000.0)
    deadlines: list[float] = []

    def write(deadline: float) -> None:
        deadlines.append(deadline)
        watched.stream.take(b"line\n")

    watched.watch(write, deadlines.append)
    assert deadlines[1] > deadlines[0]
    assert watched.told == ["gone"]


def test_a_job_that_was_suspended_as_a_whole_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(10.0)
    deadlines: list[float] = []

    def suspended(deadline: float) -> None:
        monkeypatch.setattr(silence.time, "monotonic", lambda: deadline + 1000)

    watched.watch(suspended, deadlines.append)
    assert watched.told == ["gone"]
    assert deadlines[0] > 1000


def test_the_end_of_a_job_that_hangs_is_said_while_workers_are_there() -> None:
    watched = Watched(1.0)
    text = "no worker has written anything for 1 s: the job hangs"
    heard: list[str] = []
    watched.watch(lambda _deadline: heard.extend(watched.silence.hear(EndHung(attempt)) for attempt in (7, 0)))
    assert heard == ["", text]
    assert watched.silence.is_hung
    done = Watched(1.0)
    done.watch(lambda _deadline: None)
    assert done.silence.hear(EndHung(0)) == ""
    assert not done.silence.is_hung
