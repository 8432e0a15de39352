"""The rank that is late in collectives is found; even ranks are not accused; clocks of hosts may differ."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from ddplaunch.features.slow_ranks.records import CollectivesSampled, pack
from ddplaunch.features.slow_ranks.slow_ranks import ClockLimits, lateness_table, warning, window
from ddplaunch.protocol.run_result import RankLateness

STEP_S = 0.1


class Calls(NamedTuple):
    """Of one rank; ``ns``: the time of each call by its number."""

    rank: int
    host: str
    ns: dict[int, int]

    def part(self, after: int, last: int) -> Calls:
        """The calls after a number, up to another."""
        return self._replace(ns={number: ns for number, ns in self.ns.items() if after < number <= last})


def job(
    seed: int,
    *,
    slow: int | None = None,
    slow_host: int | None = None,
    ranks: int = 4,
    hosts: int = 1,
    per_step: int = 1,
    overlap: bool = False,
    jitter_s: float = 0.003,
    steps: int = 250,
) -> list[Calls]:
    """Calls of a job whose clocks are seconds apart.

    Arguments:
        slow: this rank takes 20 ms longer for a step.
        slow_host: all ranks of this host do.
        per_step: collectives of each step; with ``overlap`` ranks do not wait for one before they call the next.
    """
    chance = random.Random(seed)
    clocks = [chance.uniform(-5, 5) for _ in range(hosts)]
    now = [1e9] * ranks
    created: list[list[int]] = [[] for _ in range(ranks)]
    for _ in range(steps):
        is_slow = [rank == slow or rank * hosts // ranks == slow_host for rank in range(ranks)]
        now = [at + STEP_S + chance.gauss(0, jitter_s) + 0.02 * is_slow[rank] for rank, at in enumerate(now)]
        for _ in range(per_step):
            for rank, at in enumerate(now):
                created[rank].append(int((at + clocks[rank * hosts // ranks]) * 1e6) * 1000)
            end = max(now) + 0.001
            now = [(at if overlap else end) + 0.002 + chance.expovariate(2000) for at in now]
        now = [max(at, end) for at in now]
    return [Calls(rank, f"gpu{rank * hosts // ranks}", dict(enumerate(ns, 1))) for rank, ns in enumerate(created)]


def rank_lateness(
    calls: Sequence[Calls], clocks: dict[str, ClockLimits] | None = None, *, of_hosts: bool = False
) -> tuple[RankLateness, ...]:
    """What the launcher learns of one sample, the most expensive rank or host first."""
    answers = [CollectivesSampled(0, 1, each.host, (pack(each.rank, "0", each.ns),)) for each in calls]
    ranks, hosts, _ = window(answers, clocks=clocks)
    return (hosts if of_hosts else ranks).lateness()


SHAPES = [
    {},
    {"ranks": 2},
    {"hosts": 2},
    {"hosts": 2, "per_step": 5},
    {"hosts": 2, "per_step": 5, "overlap": True},
    {"hosts": 4, "per_step": 5},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_slow_rank_is_named(shape: dict[str, int]) -> None:
    for seed in range(6 if shape else 20):
        slow = seed % shape.get("ranks", 4)
        assert warning(rank_lateness(job(seed, slow=slow, **shape))).startswith(f"rank {slow} on gpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_even_ranks_are_not_accused(shape: dict[str, int]) -> None:
    for seed in range(9):
        jitter_s = (0.001, 0.005, 0.02)[seed % 3]
        assert not warning(rank_lateness(job(seed, jitter_s=jitter_s, **shape)))


def test_a_slow_host_of_one_rank_is_not_accused_without_proof() -> None:
    """From the times of equal steps alone nobody can tell a slow rank from a clock that is ahead."""
    assert not warning(rank_lateness(job(1, slow=2, hosts=4)))


def clocks(seed: int, hosts: int, error_s: float) -> dict[str, ClockLimits]:
    """What the launcher knows of the clocks of ``job``."""
    chance, other = random.Random(seed), random.Random(-seed)
    ahead = [chance.uniform(-5, 5) for _ in range(hosts)]
    ends = [(each - other.uniform(0, error_s), each + other.uniform(0, error_s)) for each in ahead]
    return {f"gpu{host}": (int(least * 1e9), int(most * 1e9)) for host, (least, most) in enumerate(ends)}


def test_a_slow_host_is_named_where_the_clocks_are_known() -> None:
    for seed in range(10):
        times = job(seed, slow_host=seed % 2, hosts=2, ranks=8)
        known = clocks(seed, 2, 0.004)
        assert not warning(rank_lateness(times, known))
        text = warning(rank_lateness(times, known, of_hosts=True), "it waits for a CPU", of_hosts=True)
        assert text.startswith(f"all ranks on gpu{seed % 2} come after all others in ")
        assert text.endswith("; it waits for a CPU)")
        assert not warning(rank_lateness(times, of_hosts=True), of_hosts=True)


def test_a_slow_host_of_one_rank_is_named_where_the_clocks_are_known() -> None:
    times = job(1, slow=2, hosts=4)
    assert warning(rank_lateness(times, clocks(1, 4, 0.004))).startswith("rank 2 on gpu2 is last in ")
    assert rank_lateness(times, clocks(1, 4, 0.004), of_hosts=True) == ()


@pytest.mark.parametrize("error_s", [0.0002, 0.004, 0.05])
@pytest.mark.parametrize("ranks", [4, 7])
def test_even_hosts_are_not_accused_however_well_the_clocks_are_known(error_s: float, ranks: int) -> None:
    for seed in range(9):
        times = job(seed, jitter_s=(0.001, 0.005, 0.02)[seed % 3], hosts=2, ranks=ranks)
        known = clocks(seed, 2, error_s)
        assert not warning(rank_lateness(times, known))
        assert not warning(rank_lateness(times, known, of_hosts=True), of_hosts=True)


def test_a_slow_rank_is_no_slow_host() -> None:
    times = job(3, slow=3, hosts=2)
    assert warning(rank_lateness(times, clocks(3, 2, 0.004))).startswith("rank 3 on gpu1")
    assert not warning(rank_lateness(times, clocks(3, 2, 0.004), of_hosts=True), of_hosts=True)


def test_what_is_known_of_a_clock_that_was_set_meanwhile_does_not_count() -> None:
    times = job(3, slow=3, hosts=2, per_step=5)
    wrong = {host: (least + 10**10 * (host == "gpu1"),) * 2 for host, (least, _) in clocks(3, 2, 0.004).items()}
    assert warning(rank_lateness(times, wrong)) == warning(rank_lateness(times))


def test_figures_of_a_slow_rank() -> None:
    first, *others = rank_lateness(job(3, slow=2, steps=300))
    assert (first.rank, first.host) == (2, "gpu0")
    assert first.last_share > 0.95
    assert 0.015 < first.median_s < 0.025 < first.p95_s < 0.035
    assert 0.10 < first.cost_share < 0.18  # 20 of 123 ms, less what the second was late.
    assert all(other.cost_share < 0.01 for other in others)


def test_a_delay_costs_once_in_calls_that_overlap() -> None:
    first = rank_lateness(job(3, slow=2, per_step=5, overlap=True))[0]
    assert first.rank == 2
    assert 0.08 < first.cost_share < 0.2


def test_too_few_collectives() -> None:
    assert not warning(rank_lateness(job(1, slow=1, steps=150)))


def test_calls_that_do_not_count_and_records_that_begin_later() -> None:
    times = job(1, slow=1, steps=300)
    times[0] = times[0].part(30, 300)
    for number in range(1, 300, 50):
        del times[1].ns[number]
    first = rank_lateness(times)[0]
    assert first.rank == 1
    assert first.collectives == 300 - 30 - 5


def test_times_that_arrive_in_parts() -> None:
    parts = [calls.part(after, after + 100) for calls in job(1, slow=1, steps=300) for after in (0, 100, 200)]
    assert rank_lateness(parts) == rank_lateness(job(1, slow=1, steps=300))


def test_a_clock_that_is_set_during_the_run() -> None:
    times = job(1, hosts=2, steps=300)
    times[3].ns.update({number: ns + 10**10 for number, ns in times[3].part(296, 300).ns.items()})
    assert not warning(rank_lateness(times))


@pytest.mark.parametrize("times", [[], job(1)[:1]], ids=range(2))
def test_nothing_is_known(times: list[Calls]) -> None:
    assert rank_lateness(times) == ()
    assert not warning(())


def test_the_table() -> None:
    head, first, *_ = lateness_table(rank_lateness(job(3, slow=2)))
    assert head.split("  ")[:2] == ["rank", "host"]
    assert first.split()[:2] == ["2", "gpu0"]
    assert first.endswith("%")
