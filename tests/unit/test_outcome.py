"""One outcome and one exit code, from what the nodes and the user have said."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from ddplaunch.cluster.slurm import SlurmJob
from ddplaunch.errors import GAVE_UP, HARDWARE, HUNG, NODE_LOST
from ddplaunch.launcher import outcome
from ddplaunch.protocol.results import AttemptResult, RunResult, WorkerError, WorkerExit

PEER_GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:53403"


def ended(message: str, *signals: int) -> RunResult:
    """Of a run with one attempt, in which rank 1 has raised ``message``."""
    error = WorkerError(message, "", 0.0)
    exit_ = WorkerExit(1, 0, "node1", 1, 1, stopped=False, time_s=0.0, duration_s=1.0, error=error)
    return _result(AttemptResult(0, "failed", (exit_,), 1.0, cause=exit_), signals)


def _result(attempt: AttemptResult, signals: tuple[int, ...], left: tuple[int, ...] = ()) -> RunResult:
    return outcome.result(
        run_id="run",
        attempts=[attempt],
        error=None,
        signals=signals,
        unkillable_pids=left,
        unreachable_hosts=(),
        duration_s=1.0,
        run_dir=None,
    )


def test_a_worker_that_misses_its_peers_after_the_users_signal_has_not_failed():
    result = ended(PEER_GONE, signal.SIGINT)
    assert (result.outcome, result.exit_code, result.first_failure) == ("stopped", 130, None)


def test_what_could_not_be_ended_does_not_make_a_failure_of_the_users_signal():
    result = _result(AttemptResult(0, "failed", (), 1.0, reason="pids 7 cannot be ended"), (signal.SIGTERM,), (7,))
    assert (result.outcome, result.exit_code, result.unkillable_pids) == ("stopped", 143, (7,))


@pytest.mark.parametrize(("message", "signals"), [(PEER_GONE, ()), ("ValueError: no", (signal.SIGINT,))])
def test_else_it_has(message: str, signals: tuple[int, ...]):
    result = ended(message, *signals)
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert result.first_failure
    assert result.first_failure.rank == 1


@pytest.mark.parametrize(("message", "code"), [(PEER_GONE, NODE_LOST), ("ValueError: no", 1)])
def test_a_worker_that_loses_its_peers_with_the_rendezvous_is_not_the_first_failure(message: str, code: int):
    attempt = replace(ended(message).attempts[0], cause=None, lost_rendezvous=True)
    result = _result(attempt, ())
    assert (result.outcome, result.exit_code, result.first_failure is None) == ("failed", code, code == NODE_LOST)


@pytest.mark.parametrize(("message", "code"), [(PEER_GONE, HUNG), ("ValueError: no", 1)])
def test_a_worker_that_loses_its_peers_when_a_hung_job_is_ended_is_not_the_first_failure(message: str, code: int):
    result = _result(replace(ended(message).attempts[0], hung=True), ())
    assert (result.outcome, result.exit_code, result.first_failure is None) == ("failed", code, code == HUNG)


def stopped(job: SlurmJob, *signals: int) -> RunResult:
    attempt = AttemptResult(0, "stopped", (), 1.0)
    nothing = {
        "error": None,
        "unkillable_pids": (),
        "unreachable_hosts": (),
        "duration_s": 1.0,
        "run_dir": None,
    }
    return outcome.result(run_id="run", attempts=[attempt], signals=signals, job=job, **nothing)


def test_a_job_is_requeued_after_the_signals_that_ask_for_it():
    job = SlurmJob("7", 0, ("SIGUSR1",), requests_requeue=True)
    told = stopped(job, signal.SIGUSR1, signal.SIGTERM)
    assert (told.will_requeue, told.exit_code, told.slurm_job) == (True, 128 + signal.SIGUSR1, job)
    assert not stopped(job, signal.SIGTERM).will_requeue
    assert not stopped(SlurmJob("7"), signal.SIGUSR1).will_requeue


def test_nodes_that_do_not_ask_end_well_so_that_srun_does_not_end_the_one_that_does():
    job = SlurmJob("7", 0, ("SIGUSR1",))
    assert stopped(job, signal.SIGUSR1).exit_code == 0
    assert stopped(job, signal.SIGTERM).exit_code == 143


def test_broken_hardware_has_an_exit_code_of_its_own():
    attempt = ended("RuntimeError: CUDA error").attempts[0]
    broken = replace(attempt.exits[0], hardware="Xid 79, GPU 3 has fallen off the bus")
    assert _result(replace(attempt, cause=broken), ()).exit_code == HARDWARE
    assert (
        _result(replace(attempt, node_leaves="node1 is not used again: rank 1 asks for it"), ()).exit_code == HARDWARE
    )


def test_a_run_that_the_script_gives_up_has_one_code_whatever_the_workers_is():
    attempt = ended("ValueError: no").attempts[0]
    assert attempt.cause
    given_up = replace(attempt.cause, give_up="no data")
    assert _result(replace(attempt, exits=(given_up,), cause=given_up), ()).exit_code == GAVE_UP
