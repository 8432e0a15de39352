"""A hang is explained: the rank, the call and the line, from real flight records and from built ones."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from ddplaunch.features.gpus.records import GpuReading
from ddplaunch.features.hangs.explanation import MAX_SENTENCES, Explanation, explain, explain_failure, with_gpus
from ddplaunch.features.hangs.rank_list import fold
from ddplaunch.features.hangs.records import Calls, NodeEvidence, PendingCall, RankEvidence, folded, unfolded
from ddplaunch.protocol.wire import to_json
from tests.support import golden
from tests.support.hangs import call, done, evidence, ranks_of, recorded

RECORDED = ("sleep", "operation", "size_small", "order", "subgroup", "ring", "send", "recv", "shift")
"""Hangs of torch 2.13 with gloo."""


pytestmark = pytest.mark.usefixtures("utc")


def waiting(rank: int, *calls: object, **fields: object) -> RankEvidence:
    """A rank in the last of ``calls``, or in all_reduce #6."""
    return evidence(rank, calls or [*done(5), call(6)], where="train.py:7 in step", **fields)  # type: ignore[arg-type]


def nccl(number: int, operation: str = "all_reduce", **fields: object) -> object:
    return call(number, operation, backend="nccl", dtypes=("BFloat16",), **fields)  # type: ignore[arg-type]


def shifted(by: int) -> list[object]:
    """Calls of one order, whose numbers begin later."""
    names = ["all_reduce", "broadcast", "barrier", "all_gather", "all_reduce"]
    return [call(index + by, name, is_done=True) for index, name in enumerate(names, 1)]


def gathers(rank: int, whole: int) -> RankEvidence:
    """A part of another size than that of other ranks."""
    return waiting(rank, replace(call(1, "all_gather"), input_sizes=((rank + 1,),), output_sizes=((whole,),)))


def broadcasts(rank: int, source: int) -> RankEvidence:
    return waiting(rank, *done(5), call(6, "broadcast"), pending=PendingCall("broadcast", source))


PP = {"2": ("pp", (1, 3))}
AFTER_BROADCAST = [*done(5), call(6, "broadcast", is_done=True), call(7)]

CASES: dict[str, list[RankEvidence]] = {
    **{f"recorded: {name}": recorded(name) for name in RECORDED},
    "calls with other numbers": [
        *(waiting(0, *shifted(0), call(6)), waiting(1, *shifted(3), call(9))),
        *(evidence(2, shifted(0)), waiting(3, *shifted(0), call(6))),  # type: ignore[arg-type]
    ],
    "a pipeline waits for its first stage": [
        evidence(0, [], world=8, where="data.py:1 in read"),
        *(evidence(rank, [], world=8, pending=PendingCall("recv", rank - 1)) for rank in range(1, 8)),
    ],
    "NCCL runs ahead on the CPU: the first unfinished call counts": [
        *(waiting(rank, nccl(1, is_done=True), nccl(2), nccl(3), cpu_s=5.0) for rank in (0, 1, 3)),
        evidence(2, [nccl(1, is_done=True)], where="x.py:1", cpu_s=0.0),  # type: ignore[list-item]
    ],
    "NCCL waits where a rank is missing, not where all have come": [
        *(waiting(rank, nccl(1), nccl(2)) for rank in (0, 1, 3)),
        evidence(2, [nccl(1)], debugger="pdb", where="x.py:1"),  # type: ignore[list-item]
    ],
    "all ranks have come": [waiting(rank, nccl(1)) for rank in range(4)],
    "a GPU that has not started the call": [waiting(rank, nccl(1, is_started=rank != 3)) for rank in range(4)],
    "a call that has finished on the others, which are in the next": [
        *(waiting(rank, nccl(1, is_done=True), nccl(2)) for rank in range(3)),
        waiting(3, nccl(1), nccl(2)),
    ],
    "NCCL: a send without recv, with ranks of the group": [
        waiting(1, nccl(1, "send 0->1", group="2", is_p2p=True), groups=PP),
        evidence(3, [], PP, where="a.py:1"),
    ],
    "NCCL: send and recv meet": [
        waiting(0, nccl(1, "send 0->1", is_p2p=True)),
        waiting(1, nccl(1, "recv 1<-0", is_p2p=True)),
    ],
    "NCCL: a send to no number": [waiting(0, nccl(1, f"send 0->{peer}", is_p2p=True)) for peer in ("²", "9" * 5000)],
    "sizes that may differ": [waiting(rank, nccl(1, "all_to_all", size=rank + 1)) for rank in range(4)],
    "parts of a gathered tensor may differ": [gathers(rank, 10) for rank in range(4)],
    "the whole of a gathered tensor may not": [gathers(rank, 10 + (rank == 2)) for rank in range(4)],
    "another source of a broadcast": [broadcasts(rank, 2 if rank == 3 else 0) for rank in range(4)],
    "two sources of a broadcast that has finished elsewhere": [
        *(broadcasts(0, 0), broadcasts(2, 2)),
        *(waiting(1, *AFTER_BROADCAST), waiting(3, *AFTER_BROADCAST)),
    ],
    "sizes that no tensor has": [waiting(rank, call(1, size=10**5000)) for rank in (0, 1)],
    "no rank at all": [],
    "many places are summarised": [
        evidence(rank, [], world=64, pending=PendingCall("recv", rank ^ 1)) for rank in range(64)
    ],
}


def told(found: Explanation) -> str:
    head = f"{found.job_state.value}, {' '.join(found.reasons) or 'no reason'}, culprits: {fold(found.culprits)}"
    return "\n".join([head, *found.sentences])


def test_a_hang_is_explained() -> None:
    golden.check("hangs", {name: told(explain(ranks)) for name, ranks in CASES.items()})


def test_a_hang_of_ranks_of_which_few_facts_are_known_is_explained() -> None:
    """A question is a sentence, and ranks with what is known of them."""
    golden.check_pages("hangs_of_ranks", lambda case: told(explain(ranks_of(case.partition(" / ")[2]))))


def test_json() -> None:
    found = explain([waiting(0), waiting(1), evidence(2, done(5)), waiting(3)])
    golden.check("hang_json", {"a missing rank": json.dumps(to_json(found), indent=2)})


def test_a_job_whose_gpu_works_is_not_stuck() -> None:
    found = explain([evidence(0, [])])
    spinning = GpuReading(index=0, utilization=100, memory_utilization=0, power_w=120.0, power_limit_w=700.0)
    working = replace(spinning, index=1, memory_utilization=40, power_w=650.0)
    assert with_gpus(found, [NodeEvidence(host="a", gpus=(spinning,))]).job_state.value == "stuck"
    busy = with_gpus(found, [NodeEvidence(host="a", gpus=(spinning, working))])
    assert busy.job_state.value == "busy"
    computes, spins = "1 GPU computes, for example GPU 1 of a", "1 GPU spins: 100 % busy at low power, as NCCL waits"
    assert busy.sentences[-2:] == (computes, spins)


@pytest.mark.parametrize("absent", [1, 256])
def test_512_ranks_are_fast_and_short(absent: int) -> None:
    calls = done(64)
    ranks = [waiting(rank, *calls, *(call(i) for i in range(65, 90)), world=512) for rank in range(512 - absent)]
    ranks += [evidence(rank, calls, world=512, where=f"a.py:{rank}") for rank in range(512 - absent, 512)]
    start = time.process_time()
    found = explain(ranks)
    assert time.process_time() - start < 1.5  # It takes a third of that, when nothing else runs.
    assert len(found.culprits) == absent
    assert len(found.sentences) <= MAX_SENTENCES


# The failure page.


def test_a_failure_of_ranks_that_waited_is_explained() -> None:
    """A question is a sentence, ranks that have failed, those of them that are causes, and what is known of all."""

    def explained(case: str) -> str:
        _, failed, causes, ranks = (part.strip() for part in case.split(" /", 3))
        numbers = ([int(rank) for rank in text.split(",") if rank] for text in (failed, causes))
        return "\n".join(explain_failure(ranks_of(ranks), **dict(zip(("failed", "causes"), numbers, strict=True))))

    golden.check_pages("hangs_before_failures", explained)
    assert explain_failure([], failed=[], causes=[]) == ()


def test_evidence_has_equal_stacks_and_calls_once_and_can_be_restored() -> None:
    calls = [done(3), done(3), [*done(3), call(4)], None]
    ranks = [evidence(rank, made, stacks=f"at {rank // 2}") for rank, made in enumerate(calls)]
    told = folded(ranks)
    assert [each.stacks for each in told] == ["at 0", "", "at 1", ""]
    assert [each.flight_record and each.flight_record.made_of for each in told] == [None, 0, None, None]
    assert unfolded(told) == ranks
    strangers = [replace(told[1], stacks_of=7, flight_record=replace(told[1].flight_record, made_of=9))]
    (stranger,) = unfolded(strangers)
    assert (stranger.stacks, stranger.flight_record.made) == ("", Calls())
