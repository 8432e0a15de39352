"""SLURM would requeue a job that its user has cancelled: what it tells of a job shows which ones those are."""

from __future__ import annotations

from ddplaunch.features.slurm.requeue import is_cancelled
from tests.support import golden

TOLD = (
    "JobId=2 JobName=Reason=x UserId=root(0) JobState={} Reason={} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "PreemptEligibleTime=2026-11-21T16:32:11 PreemptTime={} SuspendTime=None\n"
)


def test_only_a_cancelled_job_is_let_go():
    """A question is the state of the job, its reason, and when it was preempted."""
    golden.check_answers("requeued_jobs", lambda question: is_cancelled(TOLD.format(*question.split())))
