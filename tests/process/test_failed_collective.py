"""Real gloo jobs that fail in a collective: the page says who never came, and where the others waited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.runs import run

pytestmark = pytest.mark.torch

TRAIN = """
import datetime, os, signal, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
for _ in range(5):
    dist.all_reduce(torch.ones(3))
if dist.get_rank() == 2:
    if sys.argv[1] == "sleep":
        time.sleep(1000)
    os._exit(int(sys.argv[1]))
if sys.argv[1] != "sleep":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The loss of the peer ends it, not the stop.
dist.all_reduce(torch.ones(3))
"""


def waiting(tmp_path: Path, *arguments: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    finished = run(*arguments[:-1], script, arguments[-1])
    (attempt,) = finished.report["attempts"]
    shown = re.search(r"^waiting:  (.*\n(?: {10}.*\n)*)", finished.err, re.MULTILINE)
    assert shown, finished.err
    assert [line.strip() for line in shown[1].splitlines()] == attempt["collectives"]
    return attempt["collectives"]


def test_a_timeout_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    first, second, third = waiting(tmp_path, "--dry-run", "--nnodes", "2", "--nproc-per-node", "2", "sleep")
    assert first == "rank 2 on node1 never joined all_reduce #6 of default_pg (3 floats)"
    assert re.fullmatch(r"ranks? [0-3, -]+ waited there since [\d:]+ \(train.py:13\)", second)
    assert third.startswith("rank 2 is at train.py:9 in <module>")


def test_where_the_others_were_when_a_rank_died(tmp_path: Path) -> None:
    lines = waiting(tmp_path, "--nproc-per-node", "3", "3")
    assert re.fullmatch(r"ranks 0-1 waited in all_reduce #6 of default_pg \(3 floats\) for rank 2 since .*", lines[0])
