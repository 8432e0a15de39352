"""A node's report of an attempt that arrives when another node is in the next one already: nothing of it is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import parent, wait_until
from tests.support.runs import PROGRAMS, Running
from tests.support.ssh_jobs import agent, frozen, job

pytestmark = pytest.mark.ssh

PATIENT = ("--rdzv-conf", "keep_alive_interval=10")


def wait_for_end(running: Running, host: str, attempt: int) -> None:
    """The launcher has read the report of ``host``."""
    (folder,) = (Path(found[1]) for found in running.wait_for(r"the report in (\S+)"))
    wanted = {"event": "attempt_ended", "host": host, "attempt": attempt}

    def events() -> list[dict[str, object]]:
        return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]

    wait_until(lambda: any(wanted.items() <= event.items() for event in events()), 30)


def test_the_failure_of_a_node_whose_connection_is_held_up_is_told(make_lab, tmp_path: Path):
    lab, first, second = make_lab(2), tmp_path / "first", tmp_path / "second"
    program = (PROGRAMS / "exit_with.py", f"1=+{first}+code:7,+{second}+code:7")
    running = job(lab, *PATIENT, "--nproc-per-node", "1", "--max-restarts", "1", *program)
    running.wait_for(r"ready \(pid", 2)
    connection = parent(agent(lab, "node2"))
    with frozen(connection):
        first.touch()
        running.wait_for(r"\[node1:0\] attempt 1 of 1")
    wait_for_end(running, "node2", 0)
    with frozen(connection):
        second.touch()
        wait_for_end(running, "node1", 1)
    finished = running.finish()
    assert finished.returncode == 7, finished.err
    assert "\nrank 1 on node2" in finished.err
    assert [[exit_["rank"] for exit_ in each["exits"]] for each in finished.report["attempts"]] == [[0, 1]] * 2
    assert finished.err.count("restart 1 of 1") == 1
