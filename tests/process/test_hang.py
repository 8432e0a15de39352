"""--hang-timeout: a job in which nothing moves any more is ended, and the page tells where every rank was."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.runs import PROGRAMS, run

HANG = PROGRAMS / "hang.py"
HUNG = 87
TEXT = r"nothing has moved for \d+ s: the job hangs"


def hang(*arguments: str | Path, workers: int = 2, timeout: str = "3"):
    return run("--nproc-per-node", str(workers), "--hang-timeout", timeout, "--shutdown-timeout", "1", *arguments)


def where(err: str) -> dict[str, str]:
    """``whereabouts`` of the page, by ranks."""
    return dict(re.findall(r"^  (ranks? [\d, -]+): (.*)$", err, re.MULTILINE))


def test_where_every_rank_was_is_told_whatever_it_hung_in(start_method: str) -> None:
    """resilience 3.2 #21."""
    kinds = ("loop", "gil", "c", "read", "stopped")
    endings = [f"{rank}={kind}" for rank, kind in enumerate(kinds)]
    finished = hang("--start-method", start_method, HANG, *endings, workers=len(kinds), timeout="4")
    assert finished.returncode == HUNG, finished.err
    found = where(finished.err)
    for rank, kind in enumerate(kinds):
        stands = ", suspended by a signal" if kind == "stopped" else ""
        assert re.fullmatch(rf"hang.py:\d+ in {kind}{stands}", found[f"rank {rank}"]), finished.err
        stacks = (finished.run_dir / "attempt_0" / str(rank) / "stacks.txt").read_text()
        assert f"in {kind}\n" in stacks
        assert "in main\n" in stacks
    attempt = finished.report["attempts"][0]
    assert attempt["hung"]
    assert [exit_["stopped"] for exit_ in attempt["exits"]] == [True] * len(kinds)
    assert "left:     nothing; every process of this run has ended" in finished.err


def test_a_job_that_hangs_is_restarted() -> None:
    finished = hang("--max-restarts", "1", HANG, "1=loop", "first")
    assert finished.returncode == 0, finished.err
    assert re.search(f"{TEXT}; .*hang.py:.*; restart 1 of 1", finished.err), finished.err
    assert finished.out.count("ready") == 4


def test_one_worker_that_writes_is_enough_on_whatever_node() -> None:
    finished = hang("--dry-run", "--nnodes", "2", HANG, "0=talk:5", "3=talk:3")
    assert finished.returncode == 0, finished.err


def test_all_nodes_are_ended_as_hung_though_some_have_done_their_part() -> None:
    """An endless loop moves for all that anybody can tell: only --busy-timeout ends it."""
    finished = hang("--busy-timeout", "2", "--dry-run", "--nnodes", "2", HANG, "1=busy", workers=1)
    assert finished.returncode == HUNG, finished.err
    assert re.search(r"no output and no collective for \d+ s \(--busy-timeout\)", finished.err), finished.err
    assert where(finished.err)["rank 1"].endswith("in busy")


def test_of_a_program_nothing_more_is_told() -> None:
    finished = hang("--no-python", "sleep", "100")
    assert finished.returncode == HUNG, finished.err
    assert re.search(TEXT, finished.err), finished.err
    assert "Where the ranks were" not in finished.err


def test_without_files_it_is_told_too_where_every_rank_was() -> None:
    finished = hang("--log-dir", "/dev/null", HANG, "*=loop")
    assert finished.returncode == HUNG, finished.err
    assert where(finished.err)["ranks 0-1"].endswith("in loop")
