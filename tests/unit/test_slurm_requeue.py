"""SLURM would requeue a job that its user has cancelled: what it tells of a job shows which ones those are."""

from __future__ import annotations

import pytest

from ddplaunch.features.requeue.slurm_requeue import is_cancelled

TOLD = (
    "JobId=2 JobName=Reason=x UserId=root(0) JobState={} Reason={} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "PreemptEligibleTime=2026-11-21T16:32:11 PreemptTime={} SuspendTime=None\n"
)


@pytest.mark.parametrize(
    ("state", "reason", "preempted", "expected"),
    [
        ("RUNNING", "None", "None", False),  # --signal, or preemption with a grace time.
        ("COMPLETING", "TimeLimit", "None", False),
        ("COMPLETING", "None", "2026-11-21T16:32:30", False),
        ("COMPLETING", "None", "None", True),
        ("CANCELLED", "None", "None", True),
    ],
)
def test_only_a_cancelled_job_is_let_go(state: str, reason: str, preempted: str, expected: bool):
    assert is_cancelled(TOLD.format(state, reason, preempted)) == expected
