"""When the parts of a run act: in time under a busy mailbox, and after the events when the launcher was frozen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddplaunch.launcher import timers
from ddplaunch.launcher.timers import Timers


class Part:
    """A part that is due at the times that it is given."""

    def __init__(self, *due: float) -> None:
        self.due = list(due)
        self.acted: list[float] = []

    def run_due(self, now: float) -> float:
        if self.due and now >= self.due[0]:
            self.due = [due for due in self.due if due > now]
            self.acted.append(now)
        return self.due[0] if self.due else float("inf")


class Loop:
    """A launcher's loop at a made-up time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
        self.now = 0.0
        self.mailbox = SimpleNamespace(is_empty=True)
        self.pings = Part(*range(200))
        self.timers = Timers(self.pings, parts, self.mailbox)
        monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: self.now))

    def at(self, now: float) -> float:
        self.now = now
        return self.timers.run_due()


def test_the_loop_waits_for_the_first_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Part(3.0), Part(2.0, 4.0)
    loop = Loop(monkeypatch, one, other)
    assert [loop.at(now) for now in (0.0, 2.0, 3.0, 4.0)] == [1, 3.0, 4.0, 5]
    assert (one.acted, other.acted) == ([3.0], [2.0, 4.0])


def test_a_part_acts_in_time_though_events_arrive_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(2.0)
    loop = Loop(monkeypatch, part)
    loop.mailbox.is_empty = False
    for tenths in range(30):
        loop.at(tenths / 10)
    assert part.acted == [2.0]


def test_a_launcher_that_was_frozen_handles_the_events_first(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(2.0)
    loop = Loop(monkeypatch, part)
    loop.at(0.0)
    loop.mailbox.is_empty = False
    loop.at(100.0)
    loop.at(101.0)
    assert part.acted == []
    assert loop.pings.acted[-1] == 101.0, "agents without pings would stop"
    loop.mailbox.is_empty = True
    loop.at(102.0)
    assert part.acted == [102.0]


def test_it_does_so_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(2.0)
    loop = Loop(monkeypatch, part)
    loop.at(0.0)
    loop.mailbox.is_empty = False
    for tenths in range(100):
        loop.at(100.0 + tenths / 10)
    assert part.acted == [105.0]
