"""When the parts of a run act: in time under a busy mailbox, and after the events when the launcher was frozen."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.features.hangs.records import WorkerActivity
from ddplaunch.launcher import watches
from ddplaunch.launcher.watches import Timers
from ddplaunch.protocol.launcher_agent import Report, ReportOfNode
from tests.support import golden


class Part:
    """A part that is due at the times that it is given."""

    def __init__(self, name: str, times: list[float], said: list[str]) -> None:
        self._name, self._times, self._said = name, times, said

    def run_due(self, now: float) -> float:
        if self._times and now >= self._times[0]:
            self._times = [due for due in self._times if due > now]
            self._said.append(f"{self._name} at {now:g}")
        return self._times[0] if self._times else float("inf")


class Loop:
    """A launcher's loop at a made-up time, with parts that are due at ``2,4 3``. The methods are steps of a story."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, due: str) -> None:
        self.said: list[str] = []
        self._now, self._mailbox = 0.0, SimpleNamespace(is_empty=True)
        parts = [Part("part", [*map(float, times.split(","))], self.said) for times in due.split()]
        pings = Part("pings", [*map(float, range(200))], self.said)
        self._timers = Timers(pings, parts, self._mailbox, lambda *_: pytest.fail("a part has failed"))
        monkeypatch.setattr(watches, "time", SimpleNamespace(monotonic=lambda: self._now))

    def busy(self) -> None:
        """Events wait to be handled."""
        self._mailbox.is_empty = False

    def idle(self) -> None:
        self._mailbox.is_empty = True

    def at(self, first: str, last: str = "") -> None:
        """The loop runs at this time, or ten times a second until ``last``."""
        for tenths in range(int(float(first) * 10), int(float(last or first) * 10) + 1):
            self._now = tenths / 10
            due = self._timers.run_due()
        self.said.append(f"due again at {due:g}")


def test_when_parts_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """A story is a sentence, the parts, and the steps."""

    def story(text: str) -> str:
        _, due, steps = text.split(": ")
        return golden.play(Loop(monkeypatch, due), steps)

    golden.check_pages("timers", story)


def test_a_part_that_fails_is_told_and_not_called_again_and_the_others_go_on() -> None:
    told: list[Any] = []

    def broken(now: float) -> float:
        raise ValueError(f"a bug at {now > 0}")

    part = SimpleNamespace(run_due=broken)
    others = [Part("first", [0.0], told), part, Part("last", [0.0], told)]
    timers = Timers(Part("pings", [], told), others, SimpleNamespace(is_empty=True), lambda *error: told.append(error))
    assert [timers.run_due(), timers.run_due()] == [float("inf")] * 2
    first, (failed, error), last = told
    assert first.startswith("first at ")
    assert last.startswith("last at ")
    assert failed is part
    assert str(error) == "a bug at True"


def test_an_event_that_one_watch_cannot_handle_reaches_those_behind_it_and_the_first_error_is_told() -> None:
    told: list[Any] = []

    class Broken(watches.Watch):
        def __init__(self, name: str) -> None:
            self._name = name

        def on_event(self, index: int, event: object) -> None:
            raise ValueError(f"{self._name} bug at {event}")

        def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
            raise ValueError(f"{self._name} bug at {report}")

    class Last(watches.Watch):
        def on_event(self, index: int, event: object) -> None:
            told.append((index, event))

        def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
            told.append((node_index, participants, report))

    every = watches.Watches(lambda *_: None)
    every._set((Broken("the first"), Broken("another"), Last()))
    for event in ("an event", ReportOfNode(1, (0, 1), WorkerActivity(0))):
        with pytest.raises(ValueError, match="the first bug at"):
            every.on_node_event(0, event)
    assert told == [(0, "an event"), (1, (0, 1), WorkerActivity(0))]


def test_while_events_wait_the_parts_are_asked_a_few_times_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of nodes answer a ping within a second: the parts, each with its deadlines, would take most of it."""
    now, asked = 0.0, []
    monkeypatch.setattr(watches, "time", SimpleNamespace(monotonic=lambda: now))
    part = SimpleNamespace(run_due=lambda at: asked.append(at) or float("inf"))
    timers = Timers(part, [part], SimpleNamespace(is_empty=False), lambda *_: pytest.fail("a part has failed"))
    for thousandths in range(1000):
        now = thousandths / 1000
        timers.run_due()
    assert 20 <= len(asked) <= 2 * 51
