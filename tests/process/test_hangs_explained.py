"""Real gloo jobs that hang: the cause is named, and a healthy job that is silent is left alone."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import PROGRAMS, Running, run, start

pytestmark = pytest.mark.torch
HANGS = PROGRAMS / "hangs.py"
FOUR = ("--nproc-per-node", "4")


def hang(kind: str, *arguments: str | Path) -> Running:
    options = (*FOUR, "--hang-report", "1", "--shutdown-timeout", "1")
    return start(*options, HANGS, kind, *arguments)


def explained(running: Running, state: str = "stuck") -> dict[str, Any]:
    """hang.json, once the launcher has reported; the job is stopped then, and says where it stood.

    With so short a limit, the CPU time of the start may count: then the job is first reported as busy.
    """
    for count in (1, 2):
        path = Path(running.wait_for(r"all stacks: (\S+\.txt)", count)[-1][1])
        facts = json.loads(path.with_suffix(".json").read_text())
        if facts["job_state"] == state:
            break
    running.signal(signal.SIGINT)
    err = running.finish().err
    where = r"rank 2 (probably )?never joined all_reduce #3 of default_pg|rank 2 is at an unknown line"
    assert re.search(rf"when it was stopped \(stacks: \S+/hang_\d\.txt\):\n(.*\n)*ddplaunch:   ({where})", err), err
    return facts


def test_a_rank_that_computes_for_ever_is_named() -> None:
    facts = explained(hang("endless"), "busy")
    assert (facts["culprits"], facts["job_state"]) == ([2], "busy"), facts["sentences"]
    assert re.search(r"rank 2 is at hangs.py:\d+ in endless, computing on", "; ".join(facts["sentences"]))


@pytest.mark.slow
def test_a_rank_that_only_prints_while_others_wait_is_reported_once() -> None:
    limits = ("--hang-report", "1", "--hang-timeout", "3", "--busy-timeout", "3", "--shutdown-timeout", "1")
    running = start(*FOUR, *limits, HANGS, "prints")
    (said,) = running.wait_for(r"no collective was called or finished for \d.*all stacks: (\S+\.txt)")
    facts = json.loads(Path(said[1]).with_suffix(".json").read_text())
    assert (facts["culprits"], facts["job_state"]) == ([2], "busy"), facts["sentences"]
    running.wait_for("still alive", 40)
    running.signal(signal.SIGTERM)
    done = running.finish()
    assert done.returncode == 143, "nothing has ended it before"
    assert done.err.count("no collective was called or finished") == 1
    assert re.search(r"ddplaunch:   rank 2 never joined all_reduce #3 of default_pg \(3 floats\)", done.err)
    assert re.search(r"ddplaunch:   rank 2 is at hangs.py:\d+ in prints", done.err)


@pytest.mark.slow
def test_a_rank_that_the_kernel_does_not_run_and_that_holds_the_gil_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    facts = explained(hang("uninterruptible", tmp_path / "fifo"))
    assert (facts["culprits"], facts["job_state"]) == ([2], "stuck"), facts["sentences"]
    assert "in uninterruptible sleep" in "; ".join(facts["sentences"])


@pytest.mark.slow
def test_a_suspended_rank_is_named() -> None:
    running = hang("stopped")
    (ready,) = running.wait_for(r"ready 2 (\d+)")
    running.wait_for(r"ready \d", 4)
    os.kill(int(ready[1]), signal.SIGSTOP)
    facts = explained(running)
    assert (facts["culprits"], facts["job_state"]) == ([2], "stuck"), facts["sentences"]
    assert "suspended by a signal" in "; ".join(facts["sentences"])


LITTLE = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
end = time.process_time() + 0.3
while dist.get_rank() == 0 and time.process_time() < end:
    began = time.process_time()
    sum(range(20_000))
    time.sleep(15 * (time.process_time() - began))
dist.barrier()
"""


def test_a_rank_that_does_little_for_long_is_no_hang(tmp_path: Path) -> None:
    """6 % of a core: less than counts between two samples, which are half a second apart."""
    script = tmp_path / "train.py"
    script.write_text(LITTLE)
    finished = run(*FOUR, "--hang-timeout", "2", script)
    assert finished.returncode == 0, finished.err
    assert "hang" not in finished.err
