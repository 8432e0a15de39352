"""--env over SSH: each host makes its environment, with nothing of the launcher's machine but what it is sent."""

from __future__ import annotations

import re
import sys
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
print("runs", os.environ["RANK"], demo.VERSION, torch.__version__, sys.prefix, os.path.realpath(sys.executable))
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


def with_env(lab: Lab, root: Path, *arguments: str, extra: dict[str, str] | None = None, **popen: Any) -> Finished:
    path = f"{Path(wheels.uv()).parent}:{wheels.path_without_uv()}"
    uv = {"UV_FIND_LINKS": str(root.parent / "wheels"), "UV_OFFLINE": "1"}
    extra = {"PYTHONPATH": str(ROOT), "PATH": path, **uv, **(extra or {})}
    options = ("--env", "requirements.txt", "--nproc-per-node", "1")
    return job(lab, *options, *arguments, cwd=root, extra=extra, **popen).finish()


@pytest.mark.slow
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


def hide_python(node: Node) -> None:
    """The node has no interpreter any more, neither the system's nor that of the tests."""
    for path in Path("/usr/bin").glob("python3*"):
        if path.exists() and not path.name.endswith("-config"):
            node.run(["mount", "--bind", "/dev/null", str(path)])
    for folder in (Path(sys.base_prefix) / "bin", Path(sys.prefix) / "bin"):
        node.run(["mount", "-t", "tmpfs", "none", str(folder)])


@pytest.mark.slow
def test_a_host_without_python_gets_one_by_uv(lab: Lab, root: Path, tmp_path: Path):
    for node in lab.nodes:
        hide_python(node)
    downloads = {"UV_PYTHON_DOWNLOADS_JSON_URL": str(wheels.python_downloads(tmp_path / "python"))}
    for _ in range(2):
        finished = with_env(lab, root, "train.py", extra=downloads)
        assert finished.out.count(" 1.0 stub ") == finished.out.count("/share/uv/python/cpython-") == 2, finished.err
    assert "made the environment" not in finished.err
    refused = with_env(lab, root, "train.py", extra={"UV_PYTHON": "3.10", "UV_PYTHON_DOWNLOADS": "never"})
    assert refused.returncode == 82
