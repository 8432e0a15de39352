"""--env pack: the launcher's environment is copied to the same path on hosts, whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ssh.test_environments_over_ssh import hide_python
from tests.support import installed_stub, wheels
from tests.support.nodes import Lab, Node, NodeOptions
from tests.support.processes import wait_until
from tests.support.runs import ROOT, Finished, Running, environment
from tests.support.ssh_jobs import pid_on

pytestmark = pytest.mark.ssh

TRAIN = """
import os, sys
import demo, torch
print("runs", os.environ["RANK"], demo.VERSION, sys.prefix, sys.executable, os.environ["VIRTUAL_ENV"])
"""


class Place:
    """An environment in a folder that each host of a lab has for itself, and a script for it."""

    def __init__(self, lab: Lab, folder: Path, interpreter: str = "") -> None:
        self.hosts = ",".join(node.name for node in lab.nodes)
        self.lab, self.disk, self.script = lab, folder / "own disk", folder / "train.py"
        self.path = self.disk / "my env é"
        self.path.mkdir(parents=True)
        self.python = installed_stub.build(self.path)
        if interpreter:
            self.python.unlink()
            self.python.symlink_to(interpreter)
            (self.path / "pyvenv.cfg").write_text(f"home = {Path(interpreter).parent}\n")
        self.packages = next(self.path.glob("lib/python*/site-packages"))
        self.write("demo.py", "VERSION = '1.0'\n")
        self.script.write_text(TRAIN)
        for node in lab.nodes:
            node.run(["mount", "-t", "tmpfs", "none", str(self.disk)])

    def write(self, name: str, text: str) -> Path:
        (path := self.packages / name).write_text(text)
        return path

    def copies(self, node: Node) -> Path:
        """The folder of the copies, as another process sees it that looks into the node's mounts."""
        return self.on(node, self.path.with_name(f".ddplaunch-{self.path.name}"))

    def on(self, node: Node, path: Path) -> Path:
        return Path(f"/proc/{node.init_pid}/root{path}")

    def start(self, *options: str | Path, extra: dict[str, str] | None = None) -> Running:
        words = ("--hosts", self.hosts, "--ssh-config", self.lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK")
        command = [*self.lab.prefix, self.python, "-m", "ddplaunch", *words, "--env", "pack", "--nproc-per-node", "1"]
        env = environment(
            {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": f"{self.script}.cache", **(extra or {})}
        )
        return Running(
            subprocess.Popen(
                list(map(str, (*command, *options, self.script))),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )

    def run(self, *options: str | Path, extra: dict[str, str] | None = None) -> Finished:
        return self.start(*options, extra=extra).finish()


@pytest.fixture
def place(make_lab, tmp_path: Path) -> Place:
    return Place(make_lab(2), tmp_path)


@pytest.mark.slow
def test_hosts_get_the_environment_at_the_same_path_and_later_only_what_has_changed(place: Place):
    first = place.run()
    assert first.returncode == 0, first.err
    for rank in (0, 1):
        assert f"runs {rank} 1.0 {place.path} {place.python} {place.path}\n" in first.out, first.out
    assert re.search(rf"copied the environment {place.path} to 2 hosts in .*, sent \d", first.err), first.err
    again = place.run("-v")
    assert again.out.count("runs") == 2
    assert f"2 hosts had the environment {place.path} already" in again.err, again.err
    place.write("demo.py", "VERSION = '2.0'\n")
    (place.packages / "not there").symlink_to("/usr/share/nothing")
    (place.packages / os.fsdecode(b"with \xff\nline")).write_text("x")
    changed = place.run()
    assert changed.out.count(f" 2.0 {place.path} ") == 2, changed.err
    assert "the link lib/" in changed.err
    for node in place.lab.nodes:
        assert node.run(["cat", place.packages / os.fsdecode(b"with \xff\nline")]).stdout == "x"
        assert len([each for each in place.copies(node).iterdir() if each.name != ".lock"]) == 1


@pytest.mark.slow
def test_a_check_brings_the_environment_too(place: Place):
    checked = place.run("--check")
    assert "copied the environment" in checked.err, checked.err
    assert "import torch: " in checked.out, checked.out
    assert place.run("-v").err.count("2 hosts had the environment") == 1


def test_what_we_have_not_put_there_is_left_alone_unless_it_is_equal(place: Place):
    one, other = place.lab.nodes
    for node in (one, other):
        shutil.copytree(place.path, place.on(node, place.path), symlinks=True)
    place.on(other, place.packages / "demo.py").write_text("VERSION = '0.0.1'\n")
    failed = place.run()
    assert failed.returncode == 82
    assert f"the environment {place.path} cannot be copied to hosts\n" in failed.err
    assert (
        f"  node2: {place.path} exists and is not a copy of ours: it is left as it is\nhint: An environ" in failed.err
    )
    assert not failed.out
    assert place.run("--nnodes", "1:2").out.count("runs") == 1
    assert os.listdir(place.on(other, place.disk)) == [place.path.name]


def test_a_run_keeps_the_environment_that_it_has(place: Place, tmp_path: Path):
    place.script.write_text(f"print('runs', flush=True)\nimport time\nopen({str(tmp_path / 'pipe')!r}).read()")
    os.mkfifo(tmp_path / "pipe")
    running = place.start()
    running.wait_for("runs", 2)
    place.write("demo.py", "VERSION = '2.0'\n")
    refused = place.run()
    (tmp_path / "pipe").write_text("")
    assert refused.returncode == 82
    assert f"node[1-2]: a run uses {place.path}, and the launcher's differs by now: wait" in refused.err, refused.err
    assert running.finish().returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "agent", "user"])
def test_a_copy_that_is_killed_leaves_nothing_half_and_goes_on(place: Place, whom: str):
    size, node = 64 << 20, place.lab["node1"]
    (place.packages / "large").write_bytes(os.urandom(size))
    running = place.start("--nnodes", "2")
    part = wait_until(lambda: [path for path in place.copies(node).glob("received/*.part") if is_over(path, size / 3)])
    pid = pid_on(node, "DDPLAUNCH_START") if whom == "agent" else running.pid
    os.kill(pid, signal.SIGINT if whom == "user" else signal.SIGKILL)
    failed = running.finish()
    assert "Traceback" not in failed.err
    assert "runs" not in failed.out
    assert not os.path.lexists(place.on(node, place.path))
    assert is_over(part[0], size / 3)
    place.hosts = node.name
    finished = place.run()
    assert finished.out.count("runs") == 1, finished.err
    found = re.search(r"sent ([\d.]+) MB", finished.err)
    assert found, finished.err
    whole = sum(path.stat().st_size for path in place.packages.iterdir() if path.is_file())
    assert float(found[1]) < (whole - size / 4) / 1e6
    assert [each.name for each in place.copies(node).iterdir() if each.name.startswith((".part-", "received"))] == []


def is_over(path: Path, nbytes: float) -> bool:
    return path.stat().st_size > nbytes


@pytest.mark.parametrize(
    ("remount", "problem"),
    [
        ("size=1m", r"{place} needs [\d.]+ MB, and its disk has only \d+ kB left"),
        ("ro", r"{folder}: Read-only file system"),
    ],
)
def test_a_disk_on_which_no_copy_can_be_is_one_message_for_all_hosts(place: Place, remount: str, problem: str):
    for node in place.lab.nodes:
        node.run(["mount", "-o", f"remount,{remount}", str(place.disk)])
    failed = place.run()
    assert failed.returncode == 82
    folder = place.path.with_name(f".ddplaunch-{place.path.name}")
    (line,) = re.findall(r"^  node.*", failed.err, re.MULTILINE)
    assert re.fullmatch(rf"  node\[1-2\]: {problem.format(place=place.path, folder=folder)}", line), failed.err
    assert "to the same path only. --env FILE makes one elsewhere." in failed.err
    assert not failed.out


LIBC = """
#include <string.h>
unsigned long confstr(int name, char *buffer, unsigned long size) {
    if (buffer) strncpy(buffer, "musl 1.2", size);
    return sizeof "musl 1.2";
}
"""


@pytest.mark.parametrize("what", ["processor", "libc"])
def test_another_kind_of_machine_is_named_before_anything_is_sent(make_lab, tmp_path: Path, what: str):
    """Here the machine says so itself: uname(2) by its personality, and libc of itself."""
    library = tmp_path / "libc.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=LIBC, text=True, check=True)
    by = "setarch i686" if what == "processor" else f"env LD_PRELOAD={library}"
    node2 = NodeOptions(sshd=[f'ForceCommand exec {by} /bin/sh -c "$SSH_ORIGINAL_COMMAND"'])
    place = Place(make_lab(2, node2=node2), tmp_path)
    failed = place.run()
    assert failed.returncode == 82
    problem = "its processor is of type i686, that of" if what == "processor" else r"it has musl 1\.2, and"
    line = rf"^  node2: {problem} the launcher's machine .*: the environment does not run there\n"
    assert re.search(line, failed.err, re.MULTILINE), failed.err
    assert os.listdir(place.on(place.lab["node2"], place.disk)) == []


@pytest.mark.slow
def test_the_python_of_a_virtual_environment_travels_also_to_a_host_without_any(make_lab, tmp_path: Path):
    base = tmp_path / "own disk/python"
    left_out = shutil.ignore_patterns("test", "site-packages", "idlelib", "ensurepip", "config-*", "__pycache__")
    library = Path(sys.base_prefix, "lib", f"python{wheels.interpreter()}")
    shutil.copytree(library, base / "lib" / library.name, ignore=left_out)
    (base / "bin").mkdir()
    place = Place(make_lab(2), tmp_path, shutil.copy(Path(sys.executable).resolve(), base / "bin"))
    hide_python(place.lab["node2"])
    downloads = str(wheels.python_downloads(tmp_path / "downloads"))
    path = f"{Path(wheels.uv()).parent}:{os.environ['PATH']}"
    finished = place.run(extra={"UV_PYTHON_DOWNLOADS_JSON_URL": downloads, "PATH": path})
    assert finished.out.count(f" 1.0 {place.path} ") == 2, finished.err
    copies = base.with_name(".ddplaunch-python")
    assert [place.on(node, copies).is_dir() for node in place.lab.nodes] == [True, True]
    place.lab["node1"].run(["rm", "-r", str(copies)])
    place.hosts = "node1"
    assert place.run().out.count("runs") == 1
