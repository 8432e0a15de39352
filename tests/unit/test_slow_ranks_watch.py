"""When the launcher asks for the times of collectives, what it does with the answers, and when it warns."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from ddplaunch.config import LaunchConfig, TimeoutConfig
from ddplaunch.features.slow_ranks import launcher as slow_ranks_watch
from ddplaunch.features.slow_ranks.launcher import SlowRanksWatch, reason
from ddplaunch.features.slow_ranks.records import (
    MAX_SENT,
    CollectivesSampled,
    CollectiveTimes,
    RankLoad,
    SampleCollectives,
    pack,
)
from ddplaunch.protocol.launcher_agent import OrderToNodes
from ddplaunch.protocol.wire import decode, encode
from tests.support import golden
from tests.support.watches import run_services
from tests.unit.test_member import CONFIG
from tests.unit.test_slow_ranks import Calls, job

FIRST_S, PERIOD_S = slow_ranks_watch._FIRST_S, slow_ranks_watch._PERIOD_S
LOADS = [RankLoad(rank=rank, window_s=60, cpu_s=30, io_bytes=1 << 20, run_queue_wait_s=1) for rank in range(4)]


class Job:
    """A launcher with two nodes, whose clock the test moves."""

    def __init__(self, config: LaunchConfig | None = None, *, is_started: bool = True) -> None:
        self.sent: list[object] = []
        self.shown: list[str] = []
        self.judged: SimpleQueue[Any] = SimpleQueue()
        show = lambda text, _level, kind: self.shown.append(text)  # noqa: E731
        run = run_services(config or LaunchConfig(script="x.py"), self.sent.append, show=show, post=self.judged.put)
        self.watch = SlowRanksWatch(run)
        self.now, self.loads = time.monotonic(), list(LOADS)
        if is_started:
            self.start()

    def start(self, attempt: int = 0) -> None:
        for node in (0, 1):
            self.watch.on_report(node, (0, 1), CollectivesSampled(attempt, 0, f"gpu{node}"))

    def ask(self, after_s: float = PERIOD_S + 1) -> SampleCollectives | None:
        self.now += after_s
        before = len(self.sent)
        self.watch.run_due(self.now)
        assert len(self.sent) <= before + 1
        order = self.sent[-1] if len(self.sent) > before else None
        return order if isinstance(order, SampleCollectives) else None

    def answer(
        self,
        order: SampleCollectives,
        times: Sequence[Calls],
        nodes: Sequence[int] = (0, 1),
        cost_s: float = 0.1,
    ) -> None:
        for node in nodes:
            packed = tuple(pack(each.rank, "0", each.ns) for each in times if each.host == f"gpu{node}")
            loads = tuple(load for load in self.loads if load.rank // 2 == node)
            record = CollectivesSampled(order.attempt, order.number, f"gpu{node}", packed, loads, cost_s)
            self.watch.on_report(node, (0, 1), record)
        if len(nodes) == 2:
            self.judged.get(timeout=30)()

    def order(self) -> SampleCollectives:
        order = self.ask()
        assert order
        return order

    def sample(self, times: Sequence[Calls], **answer: Any) -> SampleCollectives:
        order = self.order()
        self.answer(order, times, **answer)
        return order


def part(times: Sequence[Calls], after: int, last: int) -> list[Calls]:
    return [each.part(after, last) for each in times]


def test_once_a_rank_of_any_node_is_debugged_nobody_is_called_slow() -> None:
    job = Job()
    order = job.order()
    asked = CollectivesSampled(0, order.number, "gpu1", clock_ns=1, is_debugged=True)
    job.watch.on_report(1, (0, 1), asked)
    assert not job.ask()
    job.start(attempt=1)
    assert not job.ask()


def test_nothing_is_asked_before_there_is_a_process_group() -> None:
    started = Job(is_started=False)
    assert started.ask() is None
    started.start()
    assert started.ask(FIRST_S - PERIOD_S - 5) is None
    assert started.ask() == SampleCollectives(0, 1)


def test_off() -> None:
    off = Job(LaunchConfig(script="x.py", timeouts=TimeoutConfig(hang_report_s=None)))
    assert off.ask() is None


def test_the_next_sample_waits_for_400_times_the_cost_of_the_last() -> None:
    costly = Job()
    costly.sample([], cost_s=1.0)
    assert costly.ask() is None
    assert costly.ask(400) == SampleCollectives(0, 2)


def test_a_slow_rank_is_named_once_after_two_samples_with_what_it_does() -> None:
    slow, times = Job(), job(1, slow=2, hosts=2, steps=800)
    slow.loads[2] = replace(LOADS[2], run_queue_wait_s=12)
    assert slow.sample(part(times, 0, 150)).suspects == ()
    assert not slow.shown
    assert slow.sample(part(times, 0, 300)).suspects == (2,)
    assert len(slow.shown) == 1
    assert slow.shown[0].startswith("rank 2 on gpu1 is last in ")
    assert "delayed collectives and costs 1" in slow.shown[0]
    assert slow.shown[0].endswith(" ms late; it waits for a CPU)")
    slow.sample(part(times, 300, 550))
    slow.sample(part(times, 550, 800))
    assert len(slow.shown) == 1
    first, second, *_ = slow.watch.lateness()
    assert (first.rank, first.collectives, first.warning) == (2, 800, slow.shown[0])
    assert not second.warning


def test_even_ranks_are_not_accused_and_counted_once() -> None:
    even, times = Job(), job(1, hosts=2, steps=400)
    for end in (200, 300, 400):
        even.sample(part(times, 0, end))
    assert not even.shown
    assert {each.collectives for each in even.watch.lateness()} == {400}


def test_an_answer_that_is_missing_makes_no_figures() -> None:
    lost = Job()
    lost.sample(job(1, slow=2, hosts=2), nodes=(0,))
    assert lost.ask() == SampleCollectives(0, 2)
    assert lost.judged.empty()
    assert lost.watch.lateness() == ()


def test_without_room_for_a_thread_a_sample_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Job()
    order = full.order()
    with monkeypatch.context() as limited:
        limited.setattr(threading, "Thread", Mock(side_effect=RuntimeError("can't start new thread")))
        for node in (0, 1):
            full.watch.on_report(node, (0, 1), CollectivesSampled(0, order.number, f"gpu{node}"))
    full.judged.get_nowait()()
    assert full.ask() == SampleCollectives(0, 2)
    assert full.watch.lateness() == ()


def test_numbers_that_begin_again_in_the_next_attempt_count() -> None:
    restarted, times = Job(), job(1, slow=0, hosts=2, steps=300)
    restarted.sample(times)
    restarted.start(attempt=1)
    assert restarted.sample(times).attempt == 1
    assert not restarted.shown, "one sample of each attempt"
    assert restarted.watch.lateness()[0].collectives == 600


def test_numbers_that_begin_again_because_the_group_was_created_again_count() -> None:
    again, times = Job(), job(1, hosts=2, steps=300)
    again.sample(times)
    again.sample(part(times, 0, 100))
    assert again.watch.lateness()[0].collectives == 400


def test_where_each_node_has_a_launcher_the_order_is_for_all_nodes() -> None:
    own = Job(LaunchConfig(script="x.py", rendezvous=CONFIG))
    own.ask()
    assert own.sent == [OrderToNodes(SampleCollectives(0, 1))]


def test_packed_times_are_those_of_the_worker_to_the_microsecond() -> None:
    calls = {7: 0, 8: 5_000_000_123, 9: 5_000_002_123, 11: 6_000_000_999, 12: 5_999_999_000}
    packed = pack(3, "0", calls)
    assert (packed.rank, packed.group, packed.first_number, packed.gaps_us) == (3, "0", 7, "-,0,2,-,999998,0")
    found = dict(packed.calls())
    assert [*found] == [8, 9, 11, 12]
    assert all(abs(ns - calls[number]) < (2_000_000 if number == 12 else 1000) for number, ns in found.items())


def test_a_sample_is_small() -> None:
    (first, *_) = job(1, steps=MAX_SENT + 100)
    packed = pack(0, "0", first.ns)
    assert (packed.first_number, len(packed.gaps_us) < 8 * MAX_SENT) == (101, True)
    assert decode(encode(packed), (CollectiveTimes,)) == packed


def test_the_reason() -> None:
    """A question is what is unlike the others' load."""

    def told(question: str) -> str:
        fields = golden.keywords(question.removeprefix("even"))
        slow = replace(LOADS[2], **fields)
        assert reason(2, [slow] if "throttled" not in fields else []) == "", "there are no others"
        return reason(2, [*LOADS[:2], slow, LOADS[3]])

    golden.check_answers("slow_reasons", told)
