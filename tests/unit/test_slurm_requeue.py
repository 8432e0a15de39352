"""SLURM would requeue a job that its user has cancelled: what it tells of a job shows which ones those are."""

from __future__ import annotations

import signal

from ddplaunch.cluster.scheduled import SlurmJob
from ddplaunch.features.slurm.requeue import is_cancelled, with_job
from ddplaunch.protocol.run_result import RunResult
from tests.support import golden

TOLD = (
    "JobId=2 JobName=Reason=x UserId=root(0) JobState={} Reason={} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "PreemptEligibleTime=2026-11-21T16:32:11 PreemptTime={} SuspendTime=None\n"
)


def test_only_a_cancelled_job_is_let_go():
    """A question is the state of the job, its reason, and when it was preempted."""
    golden.check_answers("requeued_jobs", lambda question: is_cancelled(TOLD.format(*question.split())))


def test_a_run_that_is_to_be_requeued_says_so_and_only_one_of_its_launchers_has_the_exit_code():
    def told(question: str) -> str:
        given = golden.keywords(question)
        signals = [signal.Signals[name] for name in given["signals"]]
        result = RunResult("run", 128 + signals[0], given.get("outcome", "stopped"), 1.0, ())
        result = with_job(
            result, job := SlurmJob("7", **given["job"]), signals, continues=given.get("continues", False)
        )
        assert result.slurm_job == job
        return f"{result.exit_code}{', requeued' if result.will_requeue else ''}"

    golden.check_answers("requeues", told)
