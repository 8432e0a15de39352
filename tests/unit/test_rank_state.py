"""What a rank and a job do, from two samples, and whether a GPU works or only spins."""

from __future__ import annotations

import json
from dataclasses import replace

from ddplaunch.features.gpus.records import GpuReading
from ddplaunch.features.hangs.rank_state import JobState, is_blocking, job_state, rank_state, spins, works
from tests.support import golden
from tests.support.hangs import rank_of

RANKS = {
    "still": "",
    "waiting": "done=2, call=3",
    "busy": "cpu_s=4.0",
    "moving": "silent_s=1.0",
    "ended": "is_running=False",
    "debugged": "debugger='pdb'",
    "unknown": "window_s=0.0",
    "input": "waits_for_input=True",
    "blocked": "blocked_state='suspended by a signal'",
}


def test_state_of_a_rank() -> None:
    for state, words in RANKS.items():
        assert rank_state(rank_of(0, words)).value == state
    golden.check_answers("rank_states", lambda words: rank_state(rank_of(0, words)).value)


def test_state_of_a_job() -> None:
    assert job_state([]) == JobState.QUIET
    golden.check_answers(
        "job_states", lambda states: job_state([rank_of(0, RANKS[each]) for each in states.split()]).value
    )


def test_functions_that_wait_are_told_from_those_that_run_the_script() -> None:
    assert not is_blocking("")
    golden.check_answers("blocking_calls", is_blocking)


def test_a_gpu_spins_that_is_busy_without_memory_and_power() -> None:
    """A question is what differs from a GPU that spins."""
    spinning = GpuReading(index=0, utilization=100, memory_utilization=0, power_w=120.0, power_limit_w=700.0)
    golden.check_answers("spinning_gpus", lambda text: spins(replace(spinning, **json.loads(text))))
    assert not spins(GpuReading(index=0))
    assert not works(GpuReading(index=0))
