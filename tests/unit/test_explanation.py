"""A hang is explained: the rank, the call and the line, from real flight records and from built ones."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from ddplaunch.features.hangs.explanation import MAX_SENTENCES, Explanation, explain, explain_failure
from ddplaunch.features.hangs.rank_state import JobState
from ddplaunch.features.hangs.records import PendingCall, RankEvidence
from ddplaunch.protocol.wire import to_json
from tests.support.hangs import NOON_NS, call, done, evidence, recorded

TP = {"1": ("tp", (0, 1))}
ABSENT = {"blocked_state": "suspended by a signal", "where": "train.py:6 in <module> (sleep)"}


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def text(explanation: Explanation) -> str:
    return "\n".join(explanation.sentences)


def waiting(rank: int, *calls: object, **fields: object) -> RankEvidence:
    """A rank in the last of ``calls``, or in all_reduce #6."""
    return evidence(rank, calls or [*done(5), call(6)], where="train.py:7 in step", **fields)  # type: ignore[arg-type]


# Real flight records of gloo.


def test_a_rank_that_sleeps() -> None:
    found = explain(recorded("sleep"))
    assert found.job_state == JobState.STUCK
    assert found.culprits == (2,)
    assert found.reasons == ("missing",)
    assert found.sentences[0] == "rank 2 never joined all_reduce #4 of default_pg (3 floats)"
    assert found.sentences[1].startswith("ranks 0-1, 3 wait there since ")
    assert found.sentences[1].endswith(" (s.py:33 in s_sleep)")
    assert found.sentences[2] == "rank 2 is at s.py:32 in s_sleep"


def test_a_rank_that_calls_another_operation() -> None:
    found = explain(recorded("operation"))
    assert (found.culprits, found.reasons) == ((2,), ("mismatch",))
    assert found.sentences[0] == (
        "call #4 of default_pg is not the same on all ranks: "
        "ranks 0-1, 3 called all_reduce (3 floats), rank 2 called broadcast (3 floats)"
    )


def test_a_rank_that_passes_another_size() -> None:
    """The others have finished the call, and wait in the next."""
    found = explain(recorded("size_small"))
    assert (found.culprits, found.reasons) == ((2,), ("mismatch",))
    assert found.sentences[0] == (
        "call #4 of default_pg is not the same on all ranks: "
        "ranks 0-1, 3 called all_reduce (2 floats), rank 2 called all_reduce (3 floats)"
    )


def test_a_rank_that_calls_in_another_order() -> None:
    found = explain(recorded("order"))
    assert (found.culprits, found.reasons) == ((1,), ("order",))
    assert found.sentences[0] == (
        "ranks of default_pg make the same calls in another order, from #4 on: "
        "ranks 0, 2-3 called all_reduce (3 floats), rank 1 called broadcast (5 floats)"
    )


def test_a_collective_of_a_subgroup_that_its_other_rank_skips() -> None:
    found = explain(recorded("subgroup"))
    assert (found.culprits, found.reasons) == ((0, 1), ("circle",))
    assert found.sentences[0] == "ranks 0-1 wait for each other"
    assert "ranks 1-3 wait in all_reduce #4 of default_pg (3 floats) for rank 0 since" in text(found)
    assert "rank 0 waits in all_reduce #1 of tp (ranks 0-1) (3 floats) for rank 1 since" in text(found)


def test_two_groups_in_a_ring() -> None:
    found = explain(recorded("ring"))
    assert (found.culprits, found.reasons) == ((0, 1), ("circle",))
    assert "rank 0 waits in all_reduce #1 of a (ranks 0-1) (3 floats) for rank 1" in text(found)
    assert "rank 1 waits in all_reduce #1 of b (ranks 0-1) (3 floats) for rank 0" in text(found)
    assert "ranks 2-3 wait in barrier #4 of default_pg for ranks 0-1" in text(found)


def test_a_send_without_recv() -> None:
    found = explain(recorded("send"))
    assert (found.culprits, found.reasons) == ((0, 1), ("circle",))
    assert found.sentences[0] == "rank 0 sends to rank 1, which does not receive"


def test_a_recv_without_send() -> None:
    found = explain(recorded("recv"))
    assert (found.culprits, found.reasons) == ((0, 1), ("circle",))
    assert found.sentences[0] == "rank 0 receives from rank 1, which does not send"


def test_calls_that_are_not_recorded() -> None:
    """Before: three sends, and a monitored_barrier."""
    found = explain(recorded("shift"))
    assert found.culprits == (3,)
    assert found.sentences[0] == "rank 3 never joined all_reduce #8 of default_pg (3 floats)"


# Missing ranks.


def test_the_three_sides_of_a_missing_rank() -> None:
    ranks = [waiting(0), waiting(1), evidence(2, done(5), host="gpu1", **ABSENT), waiting(3, host="gpu1")]
    assert explain(ranks).sentences == (
        "rank 2 on gpu1 never joined all_reduce #6 of default_pg (3 floats)",
        "ranks 0-1, 3 wait there since 14:47:37 (train.py:7 in step)",
        "rank 2 is at train.py:6 in <module> (sleep), suspended by a signal",
    )


def test_a_missing_barrier() -> None:
    barrier = call(6, "barrier", size=0)
    found = explain([waiting(rank, *done(5), barrier) for rank in (0, 2, 3)] + [evidence(1, done(5), where="a.py:1")])
    assert found.sentences[0] == "rank 1 never joined barrier #6 of default_pg"
    assert found.sentences[2] == "rank 1 is at a.py:1"


def test_a_rank_that_has_ended() -> None:
    ended = evidence(3, is_running=False)
    found = explain([waiting(0), waiting(1), waiting(2), ended])
    assert found.culprits == (3,)
    assert found.sentences[0] == "rank 3 never joined all_reduce #6 of default_pg (3 floats)"
    assert found.sentences[2] == "rank 3 has ended"
    ended = evidence(3, done(5), is_running=False)
    assert "rank 3 has ended (its last call was all_reduce #5 of default_pg (3 floats))" in text(
        explain([waiting(0), waiting(1), waiting(2), ended])
    )


def test_all_ranks_but_one_have_ended() -> None:
    found = explain([waiting(0), *(evidence(rank, is_running=False) for rank in (1, 2, 3))])
    assert (found.job_state, found.culprits) == (JobState.STUCK, (1, 2, 3))
    assert found.sentences[2] == "ranks 1-3 have ended"


def test_a_rank_that_evaluates_is_named_but_the_job_is_busy() -> None:
    busy = evidence(0, done(5), cpu_s=5.0, where="eval.py:3 in score")
    found = explain([busy, waiting(1), waiting(2), waiting(3)])
    assert (found.job_state, found.culprits) == (JobState.BUSY, (0,))
    assert found.sentences[2] == "rank 0 is at eval.py:3 in score, computing on some 1 core"


def test_a_rank_that_is_suspended_within_the_call() -> None:
    found = explain([waiting(0), waiting(1), waiting(3), evidence(2, [*done(5), call(6)], **ABSENT)])
    assert found.culprits == (2,)
    assert found.sentences[0] == "rank 2 does not go on in all_reduce #6 of default_pg (3 floats)"


def test_a_rank_whose_flight_record_is_missing() -> None:
    found = explain([waiting(0), waiting(1), waiting(2), evidence(3, where="x.py:1 in f")])
    assert found.culprits == (3,)
    assert found.sentences[0] == "rank 3 probably never joined all_reduce #6 of default_pg (3 floats)"


def test_a_known_absentee_comes_before_an_unknown_one() -> None:
    assert explain([waiting(0), waiting(1), evidence(2, done(5)), evidence(3)]).culprits == (2,)


def test_a_node_that_says_nothing() -> None:
    found = explain([waiting(0), waiting(1), waiting(2)])
    assert found.culprits == (3,)
    assert found.sentences[-1] == "rank 3 is on a node that says nothing"


def test_without_any_flight_record() -> None:
    ranks = [evidence(rank, pending=PendingCall("all_reduce"), where="t.py:2 in f") for rank in (0, 1, 3)]
    found = explain([*ranks, evidence(2, where="t.py:1 in f (input)", waits_for_input=True)])
    assert found.sentences == (
        "rank 2 probably never joined all_reduce of default_pg",
        "ranks 0-1, 3 wait there (t.py:2 in f)",
        "rank 2 is at t.py:1 in f (input), waiting for input",
    )


def test_the_root_of_a_chain_is_the_culprit() -> None:
    """Ranks 2 and 3 wait for rank 1, which waits for rank 0 in another group."""
    chain = [
        evidence(0, done(5), TP, where="x.py:9 in load"),
        waiting(1, *done(5), call(1, group="1"), groups=TP),
        waiting(2),
        waiting(3),
    ]
    found = explain(chain)
    assert found.culprits == (0,)
    assert found.sentences[0] == "rank 0 never joined all_reduce #1 of tp (ranks 0-1) (3 floats)"
    assert "ranks 2-3 wait in all_reduce #6 of default_pg (3 floats) for ranks 0-1 since" in text(found)


def test_two_causes_are_both_named() -> None:
    groups = {"1": ("tp", (0, 1)), "2": ("tp", (2, 3))}
    ranks = [
        waiting(0, call(1, group="1"), groups=groups),
        evidence(1, [], groups),
        waiting(2, call(1, group="2"), groups=groups),
        evidence(3, [], groups),
    ]
    found = explain(ranks)
    assert found.culprits == (1, 3)
    assert "rank 1 never joined all_reduce #1 of tp (ranks 0-1) (3 floats)" in found.sentences
    assert "rank 3 never joined all_reduce #1 of tp (ranks 2-3) (3 floats)" in found.sentences


def test_groups_of_one_name_with_other_members_are_two_groups() -> None:
    first, second = {"1": ("dp", (0, 1))}, {"1": ("dp", (2, 3))}
    ranks = [
        waiting(0, call(1, group="1"), groups=first),
        evidence(1, [], first),
        evidence(2, [call(1, group="1", is_done=True)], second),
        evidence(3, [call(1, group="1", is_done=True)], second),
    ]
    assert explain(ranks).culprits == (1,)


def test_shifted_numbers_are_aligned() -> None:
    names = ["all_reduce", "broadcast", "barrier", "all_gather", "all_reduce"]

    def calls(shift: int) -> list[object]:
        return [call(index + shift, name, is_done=True) for index, name in enumerate(names, 1)]

    ranks = [
        waiting(0, *calls(0), call(6)),
        waiting(1, *calls(3), call(9)),
        evidence(2, calls(0)),
        waiting(3, *calls(0), call(6)),
    ]  # type: ignore[arg-type]
    found = explain(ranks)
    assert found.culprits == (2,)
    assert "ranks 0-1, 3 wait there" in text(found)


# Point to point.


def test_both_ranks_receive() -> None:
    ranks = [evidence(rank, done(2), pending=PendingCall("recv", 1 - rank)) for rank in (0, 1)]
    found = explain(ranks)
    assert (found.culprits, found.sentences[0]) == ((0, 1), "ranks 0-1 wait for each other")
    assert "rank 1 waits in recv from rank 0" in text(found)


def test_a_recv_from_a_rank_that_does_nothing() -> None:
    found = explain([evidence(0, done(2), pending=PendingCall("recv", 1)), evidence(1, done(2), where="a.py:1")])
    assert (found.culprits, found.sentences[0]) == ((1,), "rank 1 never sent to rank 0")


def test_a_pipeline_waits_for_its_first_stage() -> None:
    stages = [evidence(rank, [], world=8, pending=PendingCall("recv", rank - 1)) for rank in range(1, 8)]
    found = explain([evidence(0, [], world=8, where="data.py:1 in read"), *stages])
    assert found.culprits == (0,)
    assert found.sentences[0] == "rank 0 never sent to rank 1"
    assert "rank 2 waits in recv from rank 1" in text(found)
    assert len(found.sentences) <= MAX_SENTENCES


def test_a_recv_from_any_rank() -> None:
    found = explain([evidence(0, [], pending=PendingCall("recv")), evidence(1, [], world=2)])
    assert 1 in found.culprits


def test_monitored_barrier_has_no_record() -> None:
    ranks = [evidence(rank, done(5), pending=PendingCall("monitored_barrier")) for rank in (0, 1, 2)]
    found = explain([*ranks, evidence(3, done(5), where="a.py:1")])
    assert (found.culprits, found.sentences[0]) == ((3,), "rank 3 never joined monitored_barrier of default_pg")


# NCCL.


def nccl(number: int, operation: str = "all_reduce", **fields: object) -> object:
    return call(number, operation, backend="nccl", dtypes=("BFloat16",), **fields)  # type: ignore[arg-type]


def test_nccl_runs_ahead_on_the_cpu() -> None:
    """The first unfinished call counts: the missing rank has called fewer."""
    behind = evidence(2, [nccl(1, is_done=True)], where="x.py:1", cpu_s=0.0)  # type: ignore[list-item]
    ahead = [waiting(rank, nccl(1, is_done=True), nccl(2), nccl(3), cpu_s=5.0) for rank in (0, 1, 3)]
    found = explain([*ahead, behind])
    assert found.culprits == (2,)
    assert found.sentences[0] == "rank 2 never joined all_reduce #2 of default_pg (3 bfloat16)"


def test_nccl_waits_where_a_rank_is_missing_not_where_all_have_come() -> None:
    ahead = [waiting(rank, nccl(1), nccl(2)) for rank in (0, 1, 3)]
    found = explain([*ahead, evidence(2, [nccl(1)], debugger="pdb", where="x.py:1")])  # type: ignore[list-item]
    assert found.culprits == (2,)


def test_all_ranks_have_come() -> None:
    found = explain([waiting(rank, nccl(1)) for rank in range(4)])
    assert (found.culprits, found.reasons) == ((), ("unfinished",))
    assert found.sentences[0] == (
        "all ranks joined all_reduce #1 of default_pg (3 bfloat16), and it does not finish: "
        "look at the network, the GPUs and their driver"
    )


def test_a_gpu_that_has_not_started_the_call() -> None:
    found = explain([waiting(rank, nccl(1, is_started=rank != 3)) for rank in range(4)])
    assert found.culprits == (3,)
    assert found.sentences[0].endswith("and it does not finish: the GPU of rank 3 has not started it")


def test_a_call_that_has_finished_on_the_others() -> None:
    """Rank 3 stays in call 1; the others are in call 2, which rank 3 has called too."""
    ahead = [waiting(rank, nccl(1, is_done=True), nccl(2)) for rank in range(3)]
    found = explain([*ahead, waiting(3, nccl(1), nccl(2))])
    assert 3 in found.culprits
    assert "all_reduce #1 of default_pg (3 bfloat16) has finished on ranks 0-2, but not on rank 3" in text(found)


def test_nccl_send_without_recv() -> None:
    """Ranks of the group: 1 is rank 3 of the job."""
    group = {"2": ("pp", (1, 3))}
    send = nccl(1, "send 0->1", group="2", is_p2p=True)
    found = explain([waiting(1, send, groups=group), evidence(3, [], group, where="a.py:1")])
    assert (found.culprits, found.sentences[0]) == ((3,), "rank 3 never received from rank 1")
    assert found.sentences[1] == "rank 1 waits in send to rank 3 since 14:47:37 (train.py:7 in step)"


def test_nccl_send_and_recv_that_meet() -> None:
    send, recv = nccl(1, "send 0->1", is_p2p=True), nccl(1, "recv 1<-0", is_p2p=True)
    found = explain([waiting(0, send), waiting(1, recv)])
    assert found.reasons == ("unfinished",)


def test_sizes_that_may_differ() -> None:
    ranks = [waiting(rank, nccl(1, "all_to_all", size=rank + 1)) for rank in range(4)]
    assert explain(ranks).reasons == ("unfinished",)


def test_parts_of_a_gathered_tensor_may_differ() -> None:
    def gathers(rank: int, *, whole: int) -> RankEvidence:
        return waiting(rank, replace(call(1, "all_gather"), input_sizes=((rank + 1,),), output_sizes=((whole,),)))

    assert explain([gathers(rank, whole=10) for rank in range(4)]).reasons == ("unfinished",)
    assert explain([gathers(rank, whole=10 + (rank == 2)) for rank in range(4)]).culprits == (2,)


def test_another_type_is_a_mismatch() -> None:
    ranks = [waiting(rank, call(1)) for rank in range(3)]
    found = explain([*ranks, waiting(3, call(1, dtypes=("Half",)))])
    assert found.sentences[0].endswith("ranks 0-2 called all_reduce (3 floats), rank 3 called all_reduce (3 halfs)")


# Nobody waits; many ranks; foreign input.


def test_nobody_waits() -> None:
    found = explain([evidence(0, [], waits_for_input=True, where="a.py:1"), *(evidence(i, []) for i in (1, 2, 3))])
    assert found.sentences == ("ranks 1-3 are at an unknown line", "rank 0 is at a.py:1, waiting for input")
    assert found.culprits == ()


def test_no_rank_at_all() -> None:
    found = explain([])
    assert (found.job_state, found.sentences, found.culprits) == (JobState.QUIET, (), ())


def test_text_of_a_worker_is_escaped() -> None:
    found = explain([waiting(0), evidence(1, done(5), where="a.py:1 in \x1b[31m"), waiting(2), waiting(3)])
    assert "\x1b" not in text(found)


def test_json() -> None:
    found = explain([waiting(0), waiting(1), evidence(2, done(5)), waiting(3)])
    assert json.loads(json.dumps(to_json(found))) == {
        "job_state": "stuck",
        "reasons": ["missing"],
        "culprits": [2],
        "sentences": list(found.sentences),
        "waits": [
            {
                "ranks": [0, 1, 3],
                "waits_for": [2],
                "operation": "all_reduce",
                "number": 6,
                "group": "0",
                "group_description": "default_pg",
                "since_ns": NOON_NS + 6,
            }
        ],
        "states": {"waiting": [0, 1, 3], "still": [2]},
    }


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


def test_many_places_are_summarised() -> None:
    ranks = [evidence(rank, [], world=64, pending=PendingCall("recv", rank ^ 1)) for rank in range(64)]
    found = explain(ranks)
    assert len(found.sentences) <= MAX_SENTENCES
    assert found.sentences[-1] == "29 more calls wait for other reasons"


# The failure page.


def test_another_source_of_a_broadcast() -> None:
    calls = [*done(5), call(6, "broadcast")]
    ranks = [waiting(rank, *calls, pending=PendingCall("broadcast", 2 if rank == 3 else 0)) for rank in range(4)]
    found = explain(ranks)
    assert (found.reasons, found.culprits) == (("mismatch",), (3,))
    assert found.sentences[0] == (
        "the source or destination of broadcast #6 of default_pg (3 floats) is not the same on all ranks: "
        "ranks 0-2 name rank 0, rank 3 names rank 2"
    )


def test_two_sources_of_a_broadcast_that_has_finished_elsewhere() -> None:
    calls, after = [*done(5), call(6, "broadcast")], [*done(5), call(6, "broadcast", is_done=True), call(7)]
    ranks = [waiting(rank, *calls, pending=PendingCall("broadcast", rank)) for rank in (0, 2)]
    found = explain([*ranks, waiting(1, *after), waiting(3, *after)])
    assert (found.reasons, found.culprits) == (("mismatch",), (0, 2))
    assert found.sentences[0].endswith("not the same on all ranks: rank 0 names rank 0, rank 2 names rank 2")


GONE = {"is_running": False, "window_s": 0.0}


def failed(rank: int, *calls: object, **fields: object) -> RankEvidence:
    """A rank that has failed in the last of ``calls``, or in all_reduce #6."""
    return waiting(rank, *calls, **{**GONE, **fields})


def test_failure_because_another_rank_did_not_come() -> None:
    ranks = [failed(0), failed(1), evidence(2, done(5), **{**ABSENT, "window_s": 0.0}), failed(3)]
    assert explain_failure(ranks, failed=[0, 1, 3], causes=[]) == (
        "rank 2 never joined all_reduce #6 of default_pg (3 floats)",
        "ranks 0-1, 3 waited there since 14:47:37 (train.py:7 in step)",
        "rank 2 is at train.py:6 in <module> (sleep), suspended by a signal",
    )


def test_failure_of_ranks_whose_peer_has_ended_without_a_failure() -> None:
    first, *_ = explain_failure([failed(0), failed(1), evidence(2, **GONE), failed(3)], failed=[0, 1, 3], causes=[])
    assert first == "rank 2 never joined all_reduce #6 of default_pg (3 floats)"


def test_how_far_a_rank_came_that_has_died_is_not_claimed() -> None:
    """Rank 1 has lost its peer, too, and has left nothing: it is not waited for."""
    ranks = [failed(0), evidence(1, **GONE), evidence(2, **GONE), failed(3)]
    assert explain_failure(ranks, failed=[0, 1, 2, 3], causes=[2]) == (
        "ranks 0, 3 waited in all_reduce #6 of default_pg (3 floats) for rank 2 since 14:47:37 (train.py:7 in step)",
    )


def test_a_failure_of_which_only_the_ranks_of_one_node_are_known() -> None:
    """Where each node has a launcher: the ranks of the others may have come."""
    assert explain_failure([failed(0), failed(1)], failed=[0, 1], causes=[]) == (
        "ranks 0-1 waited in all_reduce #6 of default_pg (3 floats) since 14:47:37 (train.py:7 in step)",
    )


def test_failure_that_has_nothing_to_do_with_waiting() -> None:
    assert not explain_failure([evidence(0, done(3)), evidence(1, done(3))], failed=[1], causes=[1])
    assert not explain_failure([], failed=[], causes=[])


def test_failure_with_a_mismatch() -> None:
    ranks = [failed(0), failed(1), failed(2, *done(5), call(6, size=4000)), failed(3)]
    first, *_ = explain_failure(ranks, failed=[1], causes=[1])
    assert first.startswith("call #6 of default_pg is not the same on all ranks: ranks 0-1, 3 called all_reduce")


def test_a_rank_that_has_not_been_watched() -> None:
    found = explain([waiting(0), evidence(1, done(5), window_s=0.0, debugger="pdb"), waiting(2), waiting(3)])
    assert (found.job_state, found.culprits) == (JobState.BUSY, (1,))
    assert found.sentences[2] == "rank 1 is at an unknown line, in the debugger pdb"


def test_sizes_that_no_tensor_has() -> None:
    found = explain([waiting(0, call(1, size=10**5000)), waiting(1, call(1, size=10**5000))])
    assert found.sentences[0].startswith("ranks 2-3 probably never joined all_reduce #1 of default_pg")
