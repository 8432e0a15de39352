"""Workers that print more than the way to the launcher carries are not slowed, and hold up no order and no answer."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, environment
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

LINES = 100_000
"""20 MB: 7 minutes of the link, and more than the agent keeps for it."""


@pytest.mark.slow
@pytest.mark.parametrize(("listens_above", "within_s"), [(16, 15), (0, 3)], ids=["over SSH", "connected"])
def test_what_a_slow_link_cannot_carry_is_counted_and_delays_nothing(make_lab, tmp_path, listens_above, within_s):
    """How much sshd has in transit, the kernel decides: a handshake over this link takes up to 3 s then."""
    lab = make_lab(2)
    site = tmp_path / "site"
    site.mkdir()
    text = f"import ddplaunch.features.ssh.handle as handle\nhandle._LISTENS_ABOVE = {listens_above}\n"
    (site / "sitecustomize.py").write_text(text)
    program = ("--no-python", sys.executable, PROGRAMS / "chatty.py", tmp_path, str(LINES))
    path = {"PYTHONPATH": f"{site}:{environment()['PYTHONPATH']}"}
    running = job(lab, "--nproc-per-node", "1", *program, extra=path)
    running.wait_for(r"ready \(pid", 2)
    lab["node2"].slow_down(0.2, 4e5)
    (tmp_path / "go").touch()
    wait_until(lambda: (tmp_path / "printed.1").exists(), 40, "the worker is held up")
    with pytest.raises(TimeoutError):
        running.wait_for("has not answered|is lost|has lost", 1, 7)
    (tmp_path / "fail").touch()
    finished = running.finish(60)
    assert finished.returncode == 7, finished.err
    assert "\nrank 0 on " in finished.err
    took_s = float((tmp_path / "told.1").read_text()) - float((tmp_path / "failed").read_text())
    assert took_s < within_s, f"rank 1 was told {took_s:.1f} s after the failure"
    shown = len(re.findall(r"^\[node2:1\] \d{8} x{190}$", finished.out, re.MULTILINE))
    lost = re.findall(r"\.\.\. ([\d,]+) lines not shown, see node2:<run folder>/attempt_\*/0/stdout.log", finished.out)
    assert shown + sum(int(count.replace(",", "")) for count in lost) == LINES
    assert lost
