"""What the user says reaches workers on other machines byte for byte, and secrets are seen by nobody else."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import command_line
from tests.support.runs import PROGRAMS
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

ODD = ("", " ", 'it\'s "$HOME" `id` $(id) \\n %d ! ; & | # ~ *', "two\nlines\r\n\tand a tab", "-x", "--", "-", "Grüße")
ARGUMENTS = (*ODD, os.fsdecode(b"no \xff utf-8"), "y" * 120_000)
SECRET = "hunter2-the-second"


def test_arguments_and_variables_arrive_and_secrets_stay_in_the_environment(make_lab, tmp_path: Path):
    lab = make_lab(2)
    values = {f"ODD_{number}": text for number, text in enumerate(ARGUMENTS)} | {"API_TOKEN": SECRET}
    forwarded = ("-x", "ODD_*", "-x", "API_TOKEN", "-v")
    dump = ("--start-method", "spawn", PROGRAMS / "dump_environ.py", tmp_path, "wait", *ARGUMENTS)
    running = job(lab, "--nproc-per-node", "1", *forwarded, *dump, extra=values)
    running.wait_for(r"ready \(pid", 2)
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["argv"][2:] == list(ARGUMENTS)
        assert {name: seen["environ"][name] for name in values} == values
    for pid in filter(str.isdigit, os.listdir("/proc")):
        assert SECRET not in command_line(int(pid))
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert finished.returncode == 143, finished.err
    assert "API_TOKEN=***" in finished.err
    assert SECRET not in finished.err + finished.out
    logs = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs if SECRET.encode() in path.read_bytes()]
