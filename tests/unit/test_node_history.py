"""What a run says about a node: faults of hardware, failures that nothing explains; never the program's own errors."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from ddplaunch.features.health import node_history
from ddplaunch.features.health.node_history import KEEP_S, MAX_EVENTS, MAX_OF_HOST, NodeEvent
from ddplaunch.protocol.results import AttemptResult, HealthFinding, WorkerError, WorkerExit
from ddplaunch.protocol.run_result import NodeOfRun, RunResult
from tests.support import golden

NOW_S = 1_800_000_000.0
UUID = "GPU-8f1c2a33-0000-1111-2222-333344445555"
FALLEN = f"Xid 79, GPU 3 ({UUID}) has fallen off the bus"

TORCH_ADDS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nFor debugging consider passing "
    "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
"""torch adds this to every error of CUDA; it names what the error is not."""


def ended(
    returncode: int = 1, message: str = "", *, host: str = "gpu1", rank: int = 0, tail: tuple[str, ...] = ()
) -> WorkerExit:
    error = WorkerError(message, "", NOW_S) if message else None
    return WorkerExit(rank, 0, host, 7, returncode, stopped=False, time_s=NOW_S, duration_s=9.0, error=error, tail=tail)


def run_of(*attempts: tuple[WorkerExit, ...], signum: str | None = None) -> RunResult:
    results = [AttemptResult(number, "failed", exits, 9.0) for number, exits in enumerate(attempts)]
    return RunResult(
        "run1", 1, "failed", 9.0, tuple(results), signal=signum, hosts=(NodeOfRun("gpu1", 1), NodeOfRun("gpu2", 1))
    )


def found(result: RunResult, lost: dict[str, str] | None = None) -> list[tuple[str, str]]:
    return [(event.host, event.kind) for event in node_history.of_run(result, lost or {}, NOW_S)]


def event(host: str = "gpu1", run: str = "run1", *, hardware: bool = False, days: float = 0.0) -> NodeEvent:
    kind = "hardware" if hardware else "unexplained"
    return NodeEvent(host=host, kind=kind, text="broke", time_s=NOW_S - days * 86400, run_id=run)


# Failures that nothing explains.


def test_a_death_is_noted_unless_the_program_or_its_peers_explain_it() -> None:
    """A question is an exit code and what else is known; ``<torch>`` stands for what torch adds."""

    def noted(question: str) -> str:
        code, _, words = question.replace("<torch>", TORCH_ADDS.replace("\n", r"\n")).partition(" ")
        given = golden.keywords(words)
        exit_ = ended(int(code), given.pop("message", ""), tail=given.pop("tail", ()))
        exit_ = replace(exit_, **given)
        events = found(run_of((exit_, replace(ended(), host="gpu2", rank=1, stopped=True))))
        text = node_history.unexplained(exit_)
        assert events == ([("gpu1", "unexplained")] if text else [])
        return text

    golden.check_answers("unexplained", noted)


def test_workers_that_die_on_several_nodes_at_once_blame_none() -> None:
    both = (ended(-signal.SIGSEGV), ended(-signal.SIGSEGV, host="gpu2", rank=1))
    assert found(run_of(both)) == []


def test_a_program_that_dies_on_one_node_and_then_on_another_blames_none() -> None:
    assert found(run_of((ended(-signal.SIGSEGV),), (ended(-signal.SIGSEGV, host="gpu2"),))) == []
    assert found(run_of((ended(-signal.SIGSEGV),), (ended(-signal.SIGSEGV),))) == [("gpu1", "unexplained")]


def test_what_happens_after_a_users_signal_is_not_noted() -> None:
    assert found(run_of((ended(-signal.SIGKILL),), signum="SIGINT")) == []
    assert found(run_of((ended(-signal.SIGKILL),), (ended(1),), signum="SIGINT")) == [("gpu1", "unexplained")]


def test_a_hang_and_a_success_are_not_noted() -> None:
    attempt = AttemptResult(0, "failed", (ended(-signal.SIGKILL),), 9.0, hung=True)
    assert found(replace(run_of(), attempts=(attempt,))) == []
    assert found(replace(run_of(), attempts=(replace(attempt, hung=False, outcome="stopped"),))) == []


def test_a_lost_node_is_noted_and_so_is_the_scripts_wish() -> None:
    assert found(run_of(), {"gpu2": "gpu2 has not answered for 5 s"}) == [("gpu2", "unexplained")]
    asked = replace(ended(1, "RuntimeError: stop"), avoid_node="its disk is slow")
    events = node_history.of_run(run_of((asked,)), {}, NOW_S)
    assert [(event.host, event.text) for event in events] == [("gpu1", "rank 0 asked to avoid it: its disk is slow")]


# Faults of the hardware.


def test_a_verdict_hardware_is_noted_once_with_the_gpu_and_nothing_else_of_the_node() -> None:
    broken = replace(ended(-signal.SIGKILL), hardware=FALLEN)
    result = run_of((broken, replace(broken, rank=1)))
    result = replace(result, attempts=(replace(result.attempts[0], cause=broken),))
    (event,) = node_history.of_run(result, {"gpu1": "the connection to gpu1 has ended"}, NOW_S)
    assert (event.host, event.kind, event.uuid, event.text) == ("gpu1", "hardware", UUID, FALLEN)


def test_findings_that_refuse_a_gpu_are_noted_and_others_are_not() -> None:
    remap = HealthFinding(
        host="gpu1", rule="row-remap-failed", text="a row was lost", severity="refuse", gpu=2, uuid=UUID
    )
    disk = HealthFinding(host="gpu2", rule="disk-full", text="the disk is full", severity="refuse")
    result = replace(run_of(), health=(remap, disk, replace(remap, severity="warn", gpu=3)))
    (event,) = node_history.of_run(result, {}, NOW_S)
    assert (event.host, event.uuid, event.text) == ("gpu1", UUID, "GPU 2: a row was lost")


# What follows.


@pytest.mark.parametrize(("days", "is_kept"), [(6.99, True), (7.01, False), (-6.99, True), (-7.01, False)])
def test_events_expire_after_seven_days_by_whatever_clock(days: float, is_kept: bool) -> None:
    assert KEEP_S == 7 * 86400
    assert bool(node_history.kept([event(hardware=True, days=days)], NOW_S)) is is_kept


def test_the_oldest_are_forgotten_first_when_there_are_too_many() -> None:
    of_one = [event(run=f"run{number}", days=1 - number / 1000) for number in range(100)]
    kept = node_history.kept(of_one, NOW_S)
    assert [event.run_id for event in kept] == [f"run{number}" for number in range(100 - MAX_OF_HOST, 100)]
    many = [event(f"gpu{number}", days=number / 10_000) for number in range(MAX_EVENTS + 100)]
    assert [event.host for event in node_history.kept(many, NOW_S)] == [
        f"gpu{number}" for number in reversed(range(MAX_EVENTS))
    ]


def test_any_number_is_a_time() -> None:
    assert node_history.day(1e300) == "?"
