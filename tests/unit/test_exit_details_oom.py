"""Kills for memory are counted wherever the kernel tells them, and nowhere is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ddplaunch.agent.workers.exit_details import OomCounters, killed_for_memory

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_machine_that_tells_nothing_counts_nothing(tmp_path: Path) -> None:
    assert OomCounters.read(str(tmp_path)) == OomCounters(machine=0, cgroup=0)


def test_kills_on_the_machine_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "proc/vmstat", "pgmajfault 7\noom_kill 3\nnuma_hit 9\n")
    assert OomCounters.read(str(tmp_path)) == OomCounters(machine=3)


def test_kills_in_the_own_cgroup_v2_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/job:1\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/job:1/memory.events", "max 5\noom 4\noom_kill 2\noom_group_kill 1\n")
    write(tmp_path, "sys/fs/cgroup/memory.events", "oom_kill 99\n")
    assert OomCounters.read(str(tmp_path)).cgroup == 2


@pytest.mark.parametrize("line", ["4:memory:/slurm/job_1", "4:cpuset,memory,hugetlb:/slurm/job_1"])
def test_kills_in_the_own_cgroup_v1_are_counted(tmp_path: Path, line: str) -> None:
    write(tmp_path, "proc/self/cgroup", f"9:name=systemd:/\n{line}\n0::/\n")
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 6\n"
    write(tmp_path, "sys/fs/cgroup/memory/slurm/job_1/memory.oom_control", control)
    assert OomCounters.read(str(tmp_path)).cgroup == 6


def test_in_a_container_that_names_the_hosts_path_the_mounted_cgroup_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/system.slice/docker-abc.scope\n")
    write(tmp_path, "sys/fs/cgroup/memory.events", "oom_kill 8\n")
    assert OomCounters.read(str(tmp_path)).cgroup == 8


def test_what_cannot_be_read_or_understood_counts_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc/vmstat").mkdir(parents=True)
    write(tmp_path, "proc/self/cgroup", "nonsense\n0::/a\n")
    (tmp_path / "sys/fs/cgroup/a").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/a/memory.events").write_bytes(b"oom_kill \xff\noom_kill\n")
    assert OomCounters.read(str(tmp_path)) == OomCounters()


@pytest.mark.parametrize(
    ("after", "blame"),
    [
        (OomCounters(5, 2), "no"),
        (OomCounters(6, 2), "perhaps"),
        (OomCounters(6, 3), "yes"),
        (OomCounters(0, 0), "no"),
        (OomCounters(0, 3), "yes"),
    ],
)
def test_memory_is_blamed_for_certain_only_when_our_own_counter_rose(after: OomCounters, blame: str) -> None:
    assert killed_for_memory(OomCounters(machine=5, cgroup=2), after) == blame


def test_this_machine_can_be_read() -> None:
    now = OomCounters.read()
    assert killed_for_memory(now, now) == "no"
