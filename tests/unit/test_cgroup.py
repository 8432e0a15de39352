"""The own cgroup is found wherever it is mounted, and without one, or without what it needs, there is a reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch.system import cgroup

HYBRID = "32 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


class Machine:
    """A root folder with the files a kernel would show; a made-up cgroup has what a real one has."""

    def __init__(self, root: Path, own: str, mountinfo: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", f"4:memory:/elsewhere\n0::{own}\n")
        self.write("proc/self/mountinfo", mountinfo)
        self.write("proc/self/ns/pid", "")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def name(self, mark: str, pid: int) -> str:
        return f"ddplaunch-{mark}-{(self.root / 'proc/self/ns/pid').stat().st_ino}-{pid}"

    def add_own(self, folder: str, *, kill: bool = True) -> Path:
        """This process's cgroup is ``folder``; the one to be made there is there, or mkdir would make it empty."""
        self.write(f"{folder}/cgroup.procs", f"1\n{os.getpid()}\n")
        made = f"{folder}/{self.name('run', os.getpid())}"
        (self.root / made).mkdir()
        if kill:
            self.write(f"{made}/cgroup.kill", "")
        return self.root / made


@pytest.mark.parametrize(
    ("own", "mount", "folder"),
    [
        ("/", "0:38 / /sys/fs/cgroup rw shared:4", "sys/fs/cgroup"),
        ("/user.slice/a b.scope", "0:38 / /sys/fs/cgroup/unified rw", "sys/fs/cgroup/unified/user.slice/a b.scope"),
        ("/docker/4f", "0:38 /docker/4f /sys/fs/cgroup rw", "sys/fs/cgroup"),
        ("/docker/4f/job", "0:38 /docker/4f /sys/fs/cgroup rw", "sys/fs/cgroup/job"),
        (r"/app-a\x2d1.scope", r"0:38 /app-a\134x2d1.scope /mnt/my\040cgroups rw", "mnt/my cgroups"),
    ],
)
def test_the_own_cgroup_is_found_where_it_is_mounted(tmp_path: Path, own: str, mount: str, folder: str) -> None:
    machine = Machine(tmp_path, own, f"{HYBRID}30 24 {mount} - cgroup2 cgroup2 rw\n")
    made = machine.add_own(folder)
    assert cgroup.create("run", str(tmp_path)) == (made, "")


@pytest.mark.parametrize("mountinfo", [None, "", HYBRID, "30 24 0:38 /x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"])
def test_without_a_hierarchy_that_shows_this_process_there_is_a_reason(tmp_path: Path, mountinfo: str | None) -> None:
    if mountinfo is not None:
        Machine(tmp_path, "/", mountinfo).write("sys/fs/cgroup/cgroup.procs", "1\n")
    made, reason = cgroup.create("run", str(tmp_path))
    assert made is None
    assert ("proc/self/cgroup" if mountinfo is None else "no cgroup v2") in reason
    assert cgroup.kill_tagged("run", 0, str(tmp_path)) == ()


def test_a_kernel_that_cannot_kill_a_cgroup_keeps_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/", "30 24 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    made = machine.add_own("sys/fs/cgroup", kill=False)
    assert cgroup.create("run", str(tmp_path)) == (None, "the kernel has no cgroup.kill, which came with Linux 5.14")
    assert not made.exists()


def test_only_the_runs_own_cgroups_are_killed_wherever_they_are(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/", "30 24 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    machine.write("sys/fs/cgroup/cgroup.procs", f"{os.getpid()}\n")
    lost = [machine.name("a.b", 7), f"user.slice/{machine.name('a.b', 8)}", f"x/y/{machine.name('a.b', 9)}"]
    others = [machine.name(mark, 7) for mark in ("a.b-1", "a", "axb", "b")]
    others += [machine.name("a.b", 7) + "x", "ddplaunch-a.b-1-7", "ddplaunch-a.b"]
    for name in (*lost, *others):
        machine.write(f"sys/fs/cgroup/{name}/cgroup.kill", "")
        machine.write(f"sys/fs/cgroup/{name}/cgroup.procs", "4242\n")
        machine.write(f"sys/fs/cgroup/{name}/cgroup.events", "populated 1\nfrozen 0\n")
    left = cgroup.kill_tagged("a.b", 0, str(tmp_path))
    killed = [name for name in (*lost, *others) if (tmp_path / "sys/fs/cgroup" / name / "cgroup.kill").read_text()]
    assert sorted(killed) == sorted(lost)
    assert left == (4242, 4242, 4242)


def test_the_cgroup_that_holds_a_process_to_spare_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/", "30 24 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    machine.write("sys/fs/cgroup/cgroup.procs", f"{os.getpid()}\n")
    folder = f"sys/fs/cgroup/{machine.name('a', 7)}"
    for name, text in (("cgroup.kill", ""), ("cgroup.procs", "41\n"), ("below/cgroup.procs", "42\n")):
        machine.write(f"{folder}/{name}", text)
    assert [(made.name, mark) for made, mark in cgroup.of_runs(str(tmp_path))] == [(machine.name("a", 7), "a")]
    assert sorted(cgroup.members(tmp_path / folder)) == [41, 42]
    assert cgroup.kill_tagged("a", 0, str(tmp_path), excluded=frozenset({42})) == ()
    assert not (tmp_path / folder / "cgroup.kill").read_text()
