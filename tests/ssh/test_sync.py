"""--sync: hosts that share nothing with the launcher's machine get the code over SSH, but only what they lack."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.nodes import Lab, Node
from tests.support.repositories import repository
from tests.support.runs import Finished
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

TRAIN = """
import os, pathlib, sys
import lib.model
print("runs", os.environ["RANK"], lib.model.VERSION, pathlib.Path("config.txt").read_text(), os.getcwd(), __file__)
out = pathlib.Path("out.txt")
print("before:", out.read_text() if out.exists() else "nothing", flush=True)
out.write_text(lib.model.VERSION)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {"train.py": TRAIN, "lib/__init__.py": "", "lib/model.py": "VERSION = 'first'", "config.txt": "config"}
    return repository(tmp_path / "my project", {**files, ".gitignore": "data\n"})


@pytest.fixture
def lab(make_lab, root: Path) -> Lab:
    """Two hosts whose file systems have neither the code nor the launcher's home."""
    found: Lab = make_lab(2)
    for node in found.nodes:
        for folder in (root, local(node)):
            folder.mkdir(parents=True, exist_ok=True)
            node.run(["mount", "-t", "tmpfs", "none", str(folder)])
    return found


def local(node: Node) -> Path:
    """The folder with the state of programs, of the user on the node."""
    return node.folder / "home/.local"


def sync(lab: Lab, root: Path, *arguments: str, **popen: object) -> Finished:
    options = ("-v", "--sync", "--nproc-per-node", "1", "--log-dir", root.parent / "logs")
    return job(lab, *options, *arguments, cwd=root, **popen).finish()


def test_code_comes_to_hosts_without_it_and_only_changes_come_again(lab: Lab, root: Path):
    first = sync(lab, root, "train.py")
    assert first.returncode == 0, first.err
    for rank, node in enumerate(lab.nodes):
        state = local(node) / "state/ddplaunch"
        where = rf"{state}/work/my project-\w+ {state}/snapshots/my project-\w+/\w+/train\.py"
        assert re.search(rf"runs {rank} first config {where}", first.out), first.out
    assert first.out.count("before: nothing") == 2
    (root / "lib/model.py").write_text("VERSION = 'second'")
    second = sync(lab, root, "-m", "train")
    assert second.returncode == 0, second.err
    assert second.out.count(" second config ") == 2
    assert second.out.count("before: first") == 2  # What workers write stays in their working directory.
    assert "sent 0 B of code" not in second.err
    third = sync(lab, root, "train.py")
    assert third.out.count(" second config ") == 2, third.err
    assert "sent 0 B of code to 2 hosts" in third.err


def test_a_working_directory_below_the_root_is_the_same_there(lab: Lab, root: Path):
    (root / "lib/run.py").write_text("import os, model; print('runs', model.VERSION, os.getcwd().split('/')[-1])")
    options = ("--sync", "--nproc-per-node", "1", "--log-dir", root.parent / "logs")
    finished = job(lab, *options, "run.py", cwd=root / "lib").finish()
    assert finished.out.count("runs first lib") == 2, finished.err


def test_data_that_was_not_sent_is_named_on_the_failure_page_and_can_be_sent(lab: Lab, root: Path):
    (root / "data").mkdir()
    (root / "data/x").write_text("found")
    (root / "train.py").write_text("print('runs', open('data/x').read())")
    failed = sync(lab, root, "train.py")
    assert failed.returncode == 1
    assert "data is on this machine, but was not sent to the hosts: --snapshot-include data sends it" in failed.err
    assert sync(lab, root, "--snapshot-include", "data", "train.py").out.count("runs found") == 2


def test_a_job_of_variable_size_goes_on_without_a_host_that_has_no_room_for_the_code(lab: Lab, root: Path):
    (root / "big.bin").write_bytes(os.urandom(1 << 20))
    lab["node2"].run(["mount", "-o", "remount,size=500k", str(local(lab["node2"]))])
    finished = sync(lab, root, "--nnodes", "1:2", "train.py")
    assert finished.returncode == 0, finished.err
    assert "runs 0 first" in finished.out
    assert "warning: the run goes on without hosts that have no code" in finished.err
    assert re.search(r"node2: \S.*No space left on device", finished.err), finished.err
    assert "1 worker on node1" in finished.err


@pytest.mark.torch
def test_a_check_of_hosts_that_get_the_code_needs_no_script_there(lab: Lab, root: Path):
    checked = job(lab, "--check", "--sync", "train.py", cwd=root).finish()
    assert "problems found" in checked.err, checked.err  # Perhaps with a warning about this machine.


def test_what_is_in_the_way_or_does_not_fit_is_one_message_for_each_host(lab: Lab, root: Path):
    assert sync(lab, root, "train.py").returncode == 0
    (root / "out.txt").write_text("now of the code")
    (root / "big.bin").write_bytes(os.urandom(3 << 20))
    lab["node1"].run(["mount", "-o", "remount,size=2m", str(local(lab["node1"]))])
    finished = sync(lab, root, "train.py")
    assert finished.returncode == 82
    assert "the code cannot be copied to hosts" in finished.err
    assert "out.txt is in the way: the code has a file or folder of this name" in finished.err
    assert "No space left on device" in finished.err
    assert "runs" not in finished.out


def test_checkpoints_in_a_folder_of_the_code_are_found_by_a_run_of_other_code_from_another_folder(lab: Lab, root: Path):
    (root / "saved").mkdir()
    (root / "saved/.gitkeep").write_text("")
    (root / "lib/save.py").write_text("open('../saved/x', 'w').write('found')")
    options = ("--sync", "--nproc-per-node", "1", "--log-dir", root.parent / "logs")
    saved = job(lab, *options, "save.py", cwd=root / "lib").finish()
    assert saved.returncode == 0, saved.err
    (root / "train.py").write_text("print('runs', open('saved/x').read())")
    loaded = sync(lab, root, "train.py")
    assert loaded.out.count("runs found") == 2, loaded.err
