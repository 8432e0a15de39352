"""--env over SSH: each host makes its environment, with nothing of the launcher's machine but what it is sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import wheels
from tests.support.nodes import Lab, Node
from tests.support.runs import ROOT, Finished
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

TRAIN = """
import os, sys
import demo, torch
print("runs", os.environ["RANK"], demo.VERSION, torch.__version__, sys.prefix)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    wheels.torch_wheel(tmp_path / "wheels")
    wheels.wheel(tmp_path / "wheels", "demo", "1.0", {"demo.py": "VERSION = '1.0'"})
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "requirements.txt").write_text("torch\ndemo\n")
    return folder


def cache(node: Node) -> Path:
    """The cache folder of the user on the node."""
    return node.folder / "home/.cache"


@pytest.fixture
def lab(make_lab) -> Lab:
    """Two hosts with a cache of their own."""
    found: Lab = make_lab(2)
    for node in found.nodes:
        cache(node).mkdir()
        node.run(["mount", "-t", "tmpfs", "none", str(cache(node))])
    return found


def with_env(lab: Lab, root: Path, *arguments: str, uv: bool = True, **popen: Any) -> Finished:
    path = f"{Path(wheels.uv()).parent}:{wheels.path_without_uv()}" if uv else wheels.path_without_uv()
    extra = {"PYTHONPATH": str(ROOT), "PATH": path, "UV_FIND_LINKS": str(root.parent / "wheels"), "UV_OFFLINE": "1"}
    options = ("--env", "requirements.txt", "--nproc-per-node", "1")
    return job(lab, *options, *arguments, cwd=root, extra=extra, **popen).finish()


def test_each_host_makes_its_environment_with_the_launchers_uv_and_settings_once(lab: Lab, root: Path):
    first = with_env(lab, root, "train.py")
    assert first.returncode == 0, first.err
    for rank, node in enumerate(lab.nodes):
        where = rf"{cache(node)}/ddplaunch/environments/requirements-txt-\w+"
        assert re.search(rf"runs {rank} 1\.0 stub {where}", first.out), first.out
    assert "made the environment of requirements.txt in " in first.err
    again = with_env(lab, root, "-v", "train.py")
    assert again.out.count("runs") == 2, again.err
    assert "the environment of requirements.txt is in " in again.err
