"""Kills for memory are counted wherever the kernel tells them, and nowhere is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ddplaunch.agent.workers.exit_details import OomCounters, killed_for_memory
from tests.support import golden

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_kills_are_counted_wherever_the_kernel_tells_them(tmp_path: Path) -> None:
    """A question is files with their lines."""

    def counted(question: str) -> OomCounters:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for file in question.split("; "):
            path, _, lines = file.partition(" = ")
            write(root, path, "".join(f"{line}\n" for line in lines.split(" / ")))
        return OomCounters.read(str(root))

    golden.check_answers("oom_counters", counted)
    assert OomCounters.read(str(tmp_path / "missing")) == OomCounters(machine=0, cgroup=0)


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
