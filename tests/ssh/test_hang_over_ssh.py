"""A job that hangs on one of two machines is ended on both, and the page tells where every rank was."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.hangs import HANG_OPTIONS
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


@pytest.mark.slow
@pytest.mark.torch
def test_a_link_that_is_cut_while_the_control_connections_stay(make_lab, tmp_path):
    """gloo's connections are on a second interface, whose packets vanish.

    A rank that had got its last packet before has finished the collective, and waits in the next one.
    """
    lab = make_lab(2)
    lab.add_data_network()
    options = ("--nproc-per-node", "2", *HANG_OPTIONS, "--log-dir", tmp_path / "logs", "-x", "GLOO_SOCKET_IFNAME")
    running = job(lab, *options, PROGRAMS / "hangs.py", "stopped", extra={"GLOO_SOCKET_IFNAME": "eth1"})
    running.wait_for(r"ready \d", 4)
    lab["node2"].cut_data_link()
    finished = running.finish()
    assert finished.returncode == 87, finished.err
    call, ranks = r"all_reduce #\d+ of default_pg \(3 floats\)", r"ranks? [0-3, -]+"
    where = rf"all ranks joined {call}, and it does not finish|{call} has finished on {ranks}, but not on {ranks}"
    assert re.search(f"the job hangs; ({where})", finished.err), finished.err
    assert re.search(rf"{ranks} on node[12] gets? no answer over TCP from 10\.98\.0\.[12]", finished.err), finished.err
    facts = json.loads(next((tmp_path / "logs").rglob("hang.json")).read_text())
    assert facts["states"] == {"waiting": [0, 1, 2, 3]}
    assert "left:     nothing; every process of this run has ended" in finished.err
