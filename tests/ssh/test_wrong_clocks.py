"""Nodes whose clocks are hours apart, and change by a day while they work, agree on who failed first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nodes import NodeOptions
from tests.support.runs import environment
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

# For every Python process of a node.
CLOCK = """
import os, time
real, offset_s, changed = time.time, float(os.environ.get("CLOCK_OFFSET_S", "0")), __file__ + ".changed"
if offset_s:
    time.time = lambda: real() + offset_s * (-24 if os.path.exists(changed) else 1)
"""

SCRIPT = """
import os, signal, sitecustomize, time
from pathlib import Path
def told(*_):
    Path(sitecustomize.changed).touch()
    os._exit(5)
signal.signal(signal.SIGTERM, told)
print("ready", time.time(), flush=True)
while os.environ["RANK"] != "2" or not Path(__file__ + ".fail").exists():
    time.sleep(0.01)
raise ValueError("no such luck")
"""


def clock(offset_s: int) -> NodeOptions:
    return NodeOptions(home={".bashrc": f"export CLOCK_OFFSET_S={offset_s}"})


def test_the_culprit_is_named_by_the_order_of_events_and_not_by_any_clock(make_lab, tmp_path: Path):
    lab = make_lab(2, node1=clock(3600), node2=clock(-3600))
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    (tmp_path / "fails.py").write_text(SCRIPT)
    path = {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    running = job(lab, tmp_path / "fails.py", hosts="node1:slots=2,node2:slots=1", extra=path)
    apart_s = [float(match[1]) for match in running.wait_for(r"ready (\S+)", 3)]
    assert max(apart_s) - min(apart_s) > 7000
    (tmp_path / "fails.py.fail").touch()
    finished = running.finish()
    assert finished.returncode == 1, finished.err
    assert "\nrank 2 on " in finished.err
    assert "ValueError: no such luck" in finished.err
    assert "stopped:  ranks 0-1 (by ddplaunch, because of the failure)" in finished.err
    assert finished.report["first_failure"]["rank"] == 2
