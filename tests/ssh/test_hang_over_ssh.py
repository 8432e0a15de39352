"""A job that hangs on one of two machines is ended on both, and the page tells where every rank was."""

from __future__ import annotations

import pytest

from tests.support.runs import PROGRAMS
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh


@pytest.mark.slow
def test_a_rank_that_is_elsewhere_is_found_on_whichever_machine_it_is(make_lab):
    lab = make_lab(2)
    options = ("--nproc-per-node", "1", "--hang-timeout", "3", "--max-restarts", "1")
    finished = job(lab, *options, PROGRAMS / "hang.py", "0=c", "1=gil").finish()
    assert finished.returncode == 87, finished.err
    assert [attempt["hung"] for attempt in finished.report["attempts"]] == [True, True]
    assert "in c\n" in finished.err
    assert "  rank 1: hang.py:" in finished.err
    assert "in c\n" in (finished.run_dir / "failed" / "rank_0" / "stacks.txt").read_text()
    assert "left:     nothing; every process of this run has ended" in finished.err
