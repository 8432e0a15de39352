"""Ranks draw different random numbers unless the script seeds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import PROGRAMS, run

pytestmark = pytest.mark.torch


def test_every_rank_draws_other_numbers_in_every_attempt(tmp_path: Path) -> None:
    """Forked ranks: nothing of ours touches the seeds of an exec'd one, which is a new interpreter each time."""
    finished = run("--nproc-per-node", "2", "--max-restarts", "1", PROGRAMS / "draw_numbers.py", tmp_path)
    assert finished.returncode == 0, finished.err
    drawn = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?-?.json"))]
    assert len(drawn) == 4
    for kind in drawn[0]:
        assert len({json.dumps(numbers[kind]) for numbers in drawn}) == len(drawn), f"{kind} repeats"
