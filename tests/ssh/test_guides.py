"""docs/snapshots.md: the commands of its guides for several machines, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ssh.test_sync import hide
from tests.support.nodes import Lab
from tests.support.repositories import repository
from tests.support.runs import ROOT, Finished, Running, environment

pytestmark = pytest.mark.ssh

PAGE = (ROOT / "docs/snapshots.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:])
TRAIN = """
import os, pathlib, sys
print("runs", os.environ["RANK"], __file__, flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    (pathlib.Path.cwd() / "train.py").unlink(missing_ok=True)
    (pathlib.Path.cwd() / "train.py").write_text("raise SystemExit('edited')")
    sys.exit(int("--max-restarts" in os.environ["GUIDE"]))
"""


def follow(lab: Lab, title: str, folder: Path) -> Finished:
    """Run the command of a guide in ``folder``; its hosts are gpu1 and gpu2."""
    text = re.findall(r"^```\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)[0]
    aliases = "".join(lab.config_of(node, f"gpu{number}") for number, node in enumerate(lab.nodes, 1))
    lab.ssh_config.write_text(lab.ssh_config.read_text() + aliases)
    program = folder.parent / "bin/ddplaunch"
    program.parent.mkdir()
    forwarded = "-x DDPLAUNCH_TEST_MARK -x GUIDE --nproc-per-node 1"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m ddplaunch --ssh-config {lab.ssh_config} {forwarded} "$@"\n'
    )
    program.chmod(0o755)
    env = environment({"PATH": f"{program.parent}:{os.environ['PATH']}", "GUIDE": text})
    pipe = subprocess.PIPE
    command = ["bash", "-ec", text]
    return Running(lab.popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)).finish()


@pytest.mark.slow
def test_a_cluster_with_a_shared_home(make_lab, tmp_path: Path):
    project = repository(tmp_path / "project", {"train.py": TRAIN})
    finished = follow(make_lab(2), "A cluster with a shared home", project)
    assert finished.returncode == 0, finished.err
    assert len(re.findall(r"runs \d \S+/snapshots/project-\w+/\w+/train.py", finished.out)) >= 3
    assert "restart 1 of 3" in finished.err
    assert "edited" in (project / "train.py").read_text()


@pytest.mark.slow
def test_rented_machines_nothing_shared(make_lab, tmp_path: Path):
    project = repository(tmp_path / "project", {"train.py": TRAIN})
    lab: Lab = make_lab(2)
    for node in lab.nodes:
        hide(node, project)
    finished = follow(lab, "Rented machines, nothing shared", project)
    assert finished.returncode == 0, finished.err
    assert len(re.findall(r"runs \d \S+/snapshots/project-\w+/\w+/train.py", finished.out)) == 2
    assert (project / "train.py").read_text() == TRAIN
