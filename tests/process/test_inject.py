"""What ``--inject`` asks for happens when it says; the job answers as to the real thing, and all of it is told."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.errors import NODE_LOST, USAGE
from ddplaunch.features.faults.fault_spec import GRAMMAR
from tests.support.processes import is_alive, state, wait_until
from tests.support.runs import PROGRAMS, Finished, Running, run, start

EXIT_WITH = PROGRAMS / "exit_with.py"
STAND_STILL = PROGRAMS / "stand_still.py"


def dry(*injections: str, nodes: str = "2", nproc: int = 1) -> tuple[str, ...]:
    """The options of a dry run with these injections."""
    options = ("--dry-run", "--nnodes", nodes, "--nproc-per-node", str(nproc), "--shutdown-timeout", "10")
    return (*options, *(word for text in injections for word in ("--inject", text)))


def account(finished: Finished, number: int = 0) -> str:
    """What is told of an injection, on the screen and in the report alike."""
    injected = finished.report["injections"][number]
    assert f"ddplaunch: inject {injected['text']}: {injected['account']}\n" in finished.err
    return injected["account"]


def returncodes(attempt: dict[str, Any]) -> list[int]:
    return [exit_["returncode"] for exit_ in attempt["exits"]]


def pid_of(running: Running, rank: int) -> int:
    return int(running.wait_for(rf"^\[\w+:{rank}\] ready \(pid: (\d+)")[0][1])


# Workers.


def test_a_killed_rank_restarts_the_job_on_all_nodes() -> None:
    """The time is long enough that on a busy machine the workers of the other node have started too."""
    finished = run(*dry("kill rank=3 after=1500ms", nproc=2), "--max-restarts", "1", EXIT_WITH, "*=wait,code:0")
    assert finished.returncode == 0, finished.err
    first, second = finished.report["attempts"]
    assert returncodes(first) == [-15, -15, -15, -9]
    assert returncodes(second) == [0] * 4
    assert re.fullmatch(
        r"rank 3 on node1 got SIGKILL \d+\.\d s into attempt 0; attempt 1 ran \d+\.\d\d s later, and the job succeeded",
        account(finished),
    )
    assert finished.report["injections"][0]["after_s"] >= 1.5


def test_a_rank_that_is_to_exit_ends_with_that_code_when_it_prints_the_line() -> None:
    options = dry("exit rank=1 code=7 after-line='attempt 0 of'", nodes="1", nproc=2)
    finished = run(*options, EXIT_WITH)
    assert finished.returncode == 7
    assert "rank 1 on node0 failed: exit code 7\n" in finished.err
    assert "exit code 7" in finished.err
    assert "[node0:1] attempt 0 of" in finished.out
    assert returncodes(finished.report["attempts"][0]) == [-15, 7]
    assert re.match(r"rank 1 on node0 ended with exit code 7 .* the job ended with exit code 7$", account(finished))


def test_a_rank_that_hangs_stands_still_until_the_job_is_stopped() -> None:
    running = start(*dry("hang rank=1 after-line=ready", nodes="1", nproc=2), EXIT_WITH)
    pid = pid_of(running, 1)
    wait_until(lambda: state(pid) == "T")
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert finished.returncode == 128 + signal.SIGTERM
    assert re.match(r"rank 1 on node0 was suspended .*; the job was stopped by SIGTERM$", account(finished))


def test_a_slow_rank_gets_little_of_the_time(tmp_path: Path) -> None:
    finished = run(
        *dry("slow rank=0 by=20x after-line=ready", nodes="1", nproc=2), STAND_STILL, tmp_path / "file", "0.08"
    )
    assert finished.returncode == 0, finished.err
    assert "stood still" in finished.out
    assert account(finished).endswith("the attempt continued, and the job succeeded")


# Nodes.


def test_without_a_spare_the_world_gets_smaller_and_meets_anew(tmp_path: Path) -> None:
    running = start(*dry("lose node=0 after-line=ready", nodes="1:2"), EXIT_WITH, f"*=+{tmp_path}/go+code:0")
    lost = pid_of(running, 0)
    running.wait_for(r"^\[node1:0\] ready")
    assert not is_alive(lost)
    (tmp_path / "go").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert returncodes(finished.report["attempts"][-1]) == [0]


def test_a_crashed_agent_ends_a_job_that_needs_its_node() -> None:
    options = dry("crash agent node=1 after=100ms", "kill rank=0 after=1m")
    finished = run(*options, "--max-restarts", "3", EXIT_WITH)
    assert finished.returncode == NODE_LOST
    assert (
        "the agent on node1 was killed by SIGKILL; no further attempt: 1 node is left, and 2 are needed\n"
        in finished.err
    )
    assert "hint:     SIGKILL came from an injected fault, " in finished.err
    assert re.match(r"the agent on node1 got SIGKILL \d+\.\d s .*; the job ended with exit code 84$", account(finished))
    assert account(finished, 1).startswith("did not happen: attempt 0 was over after ")


def test_a_job_outlives_a_short_partition(tmp_path: Path) -> None:
    finished = run(*dry("partition node=1 for=700ms after-line=ready"), STAND_STILL, tmp_path / "file", "0.6")
    assert finished.returncode == 0, finished.err
    assert "[node1:1] stood still" in finished.out
    assert account(finished).startswith("node1 was disconnected for 0.7 s")


@pytest.mark.slow
def test_a_node_that_is_cut_off_for_long_is_lost_even_where_all_meet(tmp_path: Path) -> None:
    running = start(*dry("partition node=0 after-line=ready", nodes="1:2"), EXIT_WITH, f"*=+{tmp_path}/go+code:0")
    running.wait_for(r"^\[node1:0\] ready")
    (tmp_path / "go").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert re.search("node0 has not answered for [0-9]+ s; the job can go on without it", finished.err)


def test_what_is_cut_off_can_still_be_stopped() -> None:
    running = start(*dry("partition node=1 after-line=ready"), EXIT_WITH)
    pid = pid_of(running, 1)
    wait_until(lambda: state(pid) == "T")
    running.signal(signal.SIGINT)
    finished = running.finish()
    assert finished.returncode == 128 + signal.SIGINT
    assert account(finished).endswith("the job was stopped by SIGINT")


# What does not happen.


def test_what_did_not_happen_is_told_with_the_reason() -> None:
    options = dry("kill rank=0 after=1m", "kill rank=0 attempt=3", "hang rank=0 after-line=nothing", nodes="1")
    finished = run(*options, EXIT_WITH, "*=code:0")
    assert finished.returncode == 0, finished.err
    assert re.fullmatch(r"did not happen: attempt 0 was over after \d+\.\d s", account(finished, 0))
    assert account(finished, 1) == "did not happen: there was no attempt 3"
    assert account(finished, 2) == "did not happen: no such line reached the console from rank 0 in attempt 0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dry("kill rank=0 soon=1"), ["--inject 'kill rank=0 soon=1': kill has no soon=", *GRAMMAR.splitlines()]),
        (dry("kill rank=2"), ["'kill rank=2': there is no rank 2", "This run has only ranks 0 to 1."]),
        (("--inject", "kill rank=0"), ["--inject has an effect only with --dry-run"]),
        (
            ("--dry-run", "--nnodes", "2", "--gpus", "0,1", "--inject", "lose node=0", "--inject", "kill rank=4"),
            ["'kill rank=4': there is no rank 4", "This run has only ranks 0 to 3."],
        ),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(options: tuple[str, ...], words: list[str]) -> None:
    finished = run(*options, EXIT_WITH)
    assert finished.returncode == USAGE
    assert all(word in finished.err for word in words), finished.err
    assert "did not happen" not in finished.err
