"""Ranks whose peers do not acknowledge what they send are named, with the address of the peers."""

from __future__ import annotations

from ddplaunch.features.hangs.explanation import explain
from tests.support.hangs import call, evidence


def test_ranks_that_get_no_answer_over_the_network_are_named() -> None:
    calls = [call(1)]
    hosts = {0: "gpu0", 1: "gpu0", 2: "gpu1", 3: "gpu1"}
    peers = {0: ("10.0.0.2",), 1: ("10.0.0.2",), 2: ("10.0.0.1", "10.0.0.9")}
    found = explain([evidence(rank, calls, host=hosts[rank], unanswered=peers.get(rank, ())) for rank in range(4)])
    assert found.sentences[0] == (
        "all ranks joined all_reduce #1 of default_pg (3 floats), and it does not finish: "
        "ranks 0-1 on gpu0 get no answer over TCP from 10.0.0.2; "
        "rank 2 on gpu1 gets no answer over TCP from 10.0.0.1, 10.0.0.9"
    )
    assert len([line for line in found.sentences if "no answer" in line]) == 1


def test_a_rank_that_gets_no_answer_is_named_after_another_cause() -> None:
    found = explain(
        [evidence(rank, [call(1)] if rank else [], unanswered=("10.0.0.2",) * (rank == 1)) for rank in range(4)]
    )
    assert found.culprits == (0,)
    assert found.sentences[-1] == "rank 1 on gpu0 gets no answer over TCP from 10.0.0.2"
