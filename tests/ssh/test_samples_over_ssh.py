"""Usage samples of other machines: they come thinned, with times of the launcher's clock."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.process.test_samples import ENOUGH_S, WORK, lines
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh


def test_each_host_has_a_file_on_the_launchers_machine(make_lab):
    begin = time.time()
    finished = job(make_lab(2), "--no-python", sys.executable, "-S", "-c", WORK, ENOUGH_S).finish()
    assert finished.returncode == 0, finished.err
    for node in (0, 1):
        head, starts, samples = lines(finished, node)
        assert (head["host"], starts[0]["ranks"]) == (f"node{node + 1}", [node])
        sample = samples[0]
        assert sample["s"] == pytest.approx(1, abs=0.5)
        assert begin < sample["t"] < time.time()
        assert sample["w"]["lines"][0] > 5, json.dumps(sample)
