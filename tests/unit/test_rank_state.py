"""What a rank and a job do, from two samples."""

from __future__ import annotations

import pytest

from ddplaunch.features.hangs.rank_state import (
    JobState,
    RankState,
    is_blocking,
    job_state,
    rank_state,
)
from ddplaunch.features.hangs.records import PendingCall, RankEvidence
from tests.support.hangs import call, done, evidence

STILL = evidence(0)
WAITING = evidence(1, [*done(2), call(3)])
BUSY = evidence(2, cpu_s=4.0)
MOVING = evidence(3, silent_s=1.0)
ENDED = evidence(4, is_running=False)
DEBUGGED = evidence(5, debugger="pdb")
UNKNOWN = evidence(6, window_s=0.0)


@pytest.mark.parametrize(
    ("one", "state"),
    [
        (STILL, RankState.STILL),
        (WAITING, RankState.WAITING),
        (BUSY, RankState.BUSY),
        (MOVING, RankState.MOVING),
        (ENDED, RankState.ENDED),
        (DEBUGGED, RankState.DEBUGGED),
        (UNKNOWN, RankState.UNKNOWN),
        (evidence(0, collectives_moved=True), RankState.MOVING),
        (evidence(0, collectives_moved=None), RankState.STILL),
        (evidence(0, [*done(2), call(3)], cpu_s=5.0), RankState.WAITING),  # NCCL spins.
        (evidence(0, done(3)), RankState.STILL),
        (evidence(0, done(3), pending=PendingCall("recv", 1)), RankState.WAITING),
        (evidence(0, pending=PendingCall("forward")), RankState.STILL),  # FSDP runs the script's model.
        (evidence(0, cpu_s=0.04), RankState.STILL),
        (evidence(0, cpu_s=0.05), RankState.BUSY),
        (evidence(0, cpu_s=0.5, window_s=51.0, silent_s=99.0), RankState.STILL),
        (evidence(0, io_bytes=(64 << 10) - 1), RankState.STILL),
        (evidence(0, io_bytes=64 << 10), RankState.BUSY),
        (evidence(0, io_bytes=64 << 10, window_s=65.0, silent_s=99.0), RankState.STILL),
        (evidence(0, waits_for_input=True), RankState.INPUT),
        (evidence(0, blocked_state="suspended by a signal"), RankState.BLOCKED),
        (evidence(0, [call(1)], blocked_state="suspended by a signal"), RankState.BLOCKED),
        (evidence(0, blocked_state="waits for a disk", io_bytes=1 << 20), RankState.BUSY),
        (evidence(0, [call(1)], debugger="pdb"), RankState.DEBUGGED),
    ],
)
def test_state_of_a_rank(one: RankEvidence, state: RankState) -> None:
    assert rank_state(one) == state


@pytest.mark.parametrize(
    ("ranks", "state"),
    [
        ([], JobState.QUIET),
        ([ENDED, ENDED], JobState.QUIET),
        ([ENDED, STILL], JobState.STUCK),
        ([ENDED, WAITING], JobState.STUCK),
        ([ENDED, BUSY], JobState.QUIET),
        ([ENDED, MOVING], JobState.MOVING),
        ([STILL, STILL], JobState.STUCK),
        ([WAITING, WAITING], JobState.STUCK),
        ([WAITING, STILL], JobState.STUCK),
        ([WAITING, BUSY], JobState.BUSY),
        ([WAITING, DEBUGGED], JobState.BUSY),
        ([WAITING, UNKNOWN], JobState.BUSY),
        ([WAITING, BUSY, MOVING], JobState.MOVING),
        ([STILL, BUSY], JobState.QUIET),
        ([DEBUGGED], JobState.QUIET),
        ([UNKNOWN], JobState.QUIET),
        ([evidence(0, waits_for_input=True), WAITING], JobState.STUCK),
        ([evidence(0, blocked_state="suspended by a signal"), WAITING], JobState.STUCK),
    ],
)
def test_state_of_a_job(ranks: list[RankEvidence], state: JobState) -> None:
    assert job_state(ranks) == state


@pytest.mark.parametrize("name", ["all_reduce", "recv_object_list", "barrier", "init_process_group", "isend", "reduce"])
def test_functions_that_wait(name: str) -> None:
    assert is_blocking(name)


@pytest.mark.parametrize("name", ["forward", "save", "get_rank", ""])
def test_functions_that_run_the_script(name: str) -> None:
    assert not is_blocking(name)
