"""events.jsonl of real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.runs import PROGRAMS, Finished, run, start

EXIT_WITH = PROGRAMS / "exit_with.py"


def events(finished: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (finished.run_dir / "events.jsonl").read_text().splitlines()]


def test_a_failure_and_its_restart():
    finished = run("--nproc-per-node", "2", "--max-restarts", "1", EXIT_WITH, "*=code:3")
    found = events(finished)
    kinds = [event["event"] for event in found if event["event"] not in ("message", "first_output", "worker_failed")]
    assert kinds == [
        "run_started",
        "agent_ready",
        "attempt_started",
        "attempt_ended",
        "restart",
        "attempt_started",
        "attempt_ended",
        "node_left",
        "run_ended",
    ]
    assert found[-1]["exit_code"] == finished.returncode == 3
    assert {event["attempt"] for event in found if event["event"] == "worker_failed"} == {0, 1}


def test_a_lost_node_and_the_spare_that_replaces_it(tmp_path: Path):
    options = ("--dry-run", "--nnodes", "2", "--hosts", "a,b,c", "--inject", "lose node=1 after-line=ready")
    running = start(*options, EXIT_WITH, f"*=+{tmp_path}/go+code:0")
    running.wait_for(r"^\[c:1\] ready")
    (tmp_path / "go").touch()
    found = [(event["event"], event.get("host"), event.get("attempt")) for event in events(running.finish())]
    story = [("node_lost", "b", None), ("node_joined", "c", None), ("attempt_started", "c", 1)]
    assert [event for event in found if event in story] == story
