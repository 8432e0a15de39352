"""--sync where its processes are killed at any moment, and where several commands send code at once."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ssh.test_sync import TRAIN, begin, few, lab, root, snapshots, sync  # noqa: F401
from tests.support.nodes import Lab
from tests.support.processes import wait_until
from tests.support.ssh_jobs import pid_on

pytestmark = pytest.mark.ssh

_ROUNDS = int(os.environ.get("KILLS", "4"))


def copy_is_right(lab: Lab, root: Path) -> None:  # noqa: F811
    for node in lab.nodes:
        copies = [*snapshots(node).glob("*/[!r.]*")]
        newest = max(copies, key=lambda copy: (copy / ".ddplaunch-snapshot.json").stat().st_mtime)
        for path in (root / "train.py", root / "big.bin", *root.glob("lib/*.py")):
            assert (newest / path.relative_to(root)).read_bytes() == path.read_bytes()
        assert not [*snapshots(node).glob("*/received"), *snapshots(node).glob("*/.part-*")]


@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * _ROUNDS)
def test_after_a_kill_at_any_moment_the_next_run_is_right(few: tuple[Lab, dict[str, str]], root: Path):  # noqa: F811
    """Of the launcher, or of an agent that gets files or gives them to another one. KILLS: how many."""
    lab, path = few  # noqa: F811
    for number in range(_ROUNDS):
        for each in range(40):
            (root / f"lib/file{each}.py").write_text(f"{number} {each}")
        (root / "big.bin").write_bytes(os.urandom(3 << 20))
        for node in lab.nodes:
            node.slow_down(0.02, 1.5e7)
        running, delay = begin(lab, root, "train.py", extra=path), random.uniform(0.5, 6)
        time.sleep(delay)
        victim = random.choice([None, *lab.nodes])
        with suppress(StopIteration, ProcessLookupError, TimeoutError):  # It may have no agent yet, or any more.
            os.kill(pid_on(victim, "DDPLAUNCH_START") if victim else running.process.pid, signal.SIGKILL)
        running.finish(90)
        for node in lab.nodes:
            node.full_speed()
        wait_until(lambda: not lab.leftovers(), 40, f"an agent is left: {victim}, {delay}")
        again = sync(lab, root, "train.py")
        assert again.returncode == 0, again.err
        assert again.out.count(" first config ") == 4
        copy_is_right(lab, root)


def test_runs_that_begin_at_the_same_time_run_each_their_own_code(lab: Lab, root: Path):  # noqa: F811
    running, base = [], root.parent / "logs"
    (root / "train.py").write_text(f"{TRAIN}\nimport time; time.sleep(2)")
    for number in range(3):
        (root / "lib/model.py").write_text(f"VERSION = 'v{number}'")
        running.append(begin(lab, root, "train.py"))
        wait_until(lambda taken=number: len([*base.glob("snapshots/*/[!.i]*")]) > taken, 30)
    for number, each in enumerate(running):
        finished = each.finish(60)
        assert finished.returncode == 0, finished.err
        assert sorted(re.findall(r"runs \d \w+", finished.out)) == [f"runs 0 v{number}", f"runs 1 v{number}"]
