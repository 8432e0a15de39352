"""--env over SSH: each host makes its environment, with nothing of the launcher's machine but what it is sent."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support import wheels
from tests.support.nodes import Lab, Node
from tests.support.processes import is_alive, wait_until
from tests.support.runs import ROOT, Finished
from tests.support.ssh_jobs import job, pid_on

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


def variables(root: Path) -> dict[str, str]:
    """Of a user who has uv, the wheels in a folder, and no network."""
    path = f"{Path(wheels.uv()).parent}:{wheels.path_without_uv()}"
    return {"PYTHONPATH": str(ROOT), "PATH": path, "UV_FIND_LINKS": str(root.parent / "wheels"), "UV_OFFLINE": "1"}


def with_env(lab: Lab, root: Path, *arguments: str, extra: dict[str, str] | None = None) -> Finished:
    options = ("--env", "requirements.txt", "--nproc-per-node", "1")
    return job(lab, *options, *arguments, cwd=root, extra={**variables(root), **(extra or {})}).finish()


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


@pytest.mark.slow
def test_rented_machines_need_neither_code_nor_python_as_the_guide_says(lab: Lab, root: Path, tmp_path: Path):
    for node in lab.nodes:
        hide_python(node)
        node.run(["mount", "-t", "tmpfs", "none", str(root)])
    guide = (ROOT / "docs/snapshots.md").read_text()
    (words,) = re.findall(r"^ddplaunch --hosts gpu1,gpu2 (--sync --env .*)$", guide, re.MULTILINE)
    downloads = {"UV_PYTHON_DOWNLOADS_JSON_URL": str(wheels.python_downloads(tmp_path / "python"))}
    extra = {**variables(root), **downloads}
    finished = job(lab, "--nproc-per-node", "1", *words.split(), cwd=root, extra=extra).finish()
    assert finished.returncode == 0, finished.err
    assert finished.out.count(" 1.0 stub ") == finished.out.count("/share/uv/python/cpython-") == 2, finished.err


@pytest.mark.slow
def test_hosts_where_it_fails_are_named_and_left_out_if_enough_are_left(lab: Lab, root: Path):
    lab["node2"].run(["mount", "-o", "remount,size=40k", str(cache(lab["node2"]))])
    extra = {"XDG_CACHE_HOME": ""}
    failed = with_env(lab, root, "train.py", extra=extra)
    assert failed.returncode == 82
    assert "the environment of requirements.txt cannot be made on hosts\n" in failed.err
    assert re.search(r"^  node2: .*No space left on device", failed.err, re.MULTILINE), failed.err
    assert "runs" not in failed.out
    smaller = with_env(lab, root, "--nnodes", "1:2", "train.py", extra=extra)
    assert smaller.returncode == 0, smaller.err
    assert "runs 0 1.0" in smaller.out
    assert "warning: the run goes on without hosts that have no environment" in smaller.err


def test_a_command_that_is_killed_leaves_nothing_running_on_hosts(lab: Lab, root: Path, tmp_path: Path):
    """Here the hosts have a uv of their own, which hangs."""
    for node in lab.nodes:
        uv = node.folder / "home/.local/bin/uv"
        uv.parent.mkdir(parents=True)
        uv.write_text("#!/bin/sh\nexec sleep 300\n")
        uv.chmod(0o755)
    words = ("--env", "requirements.txt", "--nproc-per-node", "1", "train.py")
    running = job(lab, *words, cwd=root, extra=variables(root))
    asleep = [pid_on(node, "sleep 300") for node in lab.nodes]
    running.wait_for("making the environment of requirements.txt: node.*: uv venv")
    running.signal(signal.SIGKILL)
    running.finish()
    wait_until(lambda: not any(map(is_alive, asleep)))


@pytest.mark.slow
def test_with_a_read_only_home_the_environment_is_in_var_tmp_and_a_check_uses_it(lab: Lab, root: Path):
    for node in lab.nodes:
        node.run(["mount", "-o", "remount,ro", str(cache(node))])
        node.run(["mount", "-t", "tmpfs", "none", "/var/tmp"])
    finished = with_env(lab, root, "train.py")
    assert len(re.findall(r"runs \d 1\.0 stub /var/tmp/ddplaunch-0/environments/req", finished.out)) == 2, finished.err
    checked = with_env(lab, root, "--check", "-v", "train.py")
    assert "the environment of requirements.txt is in /var/tmp/ddplaunch-0/environments/" in checked.err, checked.err
    assert re.search(r"^node\[1-2\] .* 2\.99\.0 ", checked.out, re.MULTILINE), checked.out + checked.err
    assert "from tmpfs at /var/tmp" in checked.out
