"""``--wait-for-gpus`` on another machine: the launcher does not give up the agent that waits, which hears it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_nvml import healthy, say
from tests.support.nodes import Lab
from tests.support.processes import wait_until
from tests.support.ssh_jobs import job

pytestmark = [pytest.mark.ssh, pytest.mark.slow, pytest.mark.timeout(300)]

LOST_AFTER_S = 30.0


def test_a_run_on_another_machine_waits_is_listed_and_can_be_stopped(
    make_lab: Callable[..., Lab], tmp_path: Path, nvml_library: Path
) -> None:
    lab, says = make_lab(1), tmp_path / "says"
    in_use = ("gpus 1", "driver 570.1", *healthy(0), "0 pid 4242")
    say(says, *in_use)
    variables = f"LD_LIBRARY_PATH={nvml_library} FAKE_NVML={says} DDPLAUNCH_LOCK_DIR={tmp_path}/locks"
    setup = ("--remote-setup", f"export {variables}")
    options = (*setup, "--start-timeout", "5", "--gpus", "free:1", "--wait-for-gpus", "1h", "--no-python", "hostname")
    stopped, waits = (job(lab, *options) for _ in range(2))
    for run in (stopped, waits):
        run.wait_for("waiting for 1 GPU of node1: place")
    began = time.monotonic()
    shown = job(lab, "--ps", "--gpus", *setup).finish()
    assert re.search(r"^node1 +0 +Fake H100 .* process 4242 uses it already$", shown.out, re.MULTILINE), shown.out
    assert (
        len(re.findall(r"^waiting on node1: \d\. run \S+ of \S+ \(pid \d+, since .*, for 1 GPU$", shown.out, re.M)) == 2
    )
    # An agent that answers no ping is lost after 30 s at its start, and one that hears none stops after 5 s.
    wait_until(lambda: time.monotonic() > began + LOST_AFTER_S + 2, LOST_AFTER_S + 10)
    stopped.signal(signal.SIGINT)
    assert stopped.finish().returncode == 130
    say(says, *in_use[:-1])
    ended = waits.finish()
    assert (ended.returncode, "node1" in ended.out) == (0, True), ended.err
