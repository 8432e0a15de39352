"""Whatever is in a cgroup of ours is gone after one write, and no cgroup stays behind; on real cgroups v2.

Each test's code runs in a mount namespace of its own, with a cgroup of its own, both gone with the test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, environment

TIMEOUT_S = 60

ENTER = 'mount -t cgroup2 none "$LAB" && mkdir -p "$HOME_CGROUP" && echo 0 > "$HOME_CGROUP/cgroup.procs" && exec "$@"'

EMPTY = """
mount -t cgroup2 none "$LAB" || exit 0
if test -d "$HOME_CGROUP"; then
    echo 1 > "$HOME_CGROUP/cgroup.kill"
    find "$HOME_CGROUP" -depth -type d -exec rmdir {} +
fi
"""

PRELUDE = f"""
import json, os, pathlib, select, signal, subprocess, sys, threading, time
from ddplaunch.system import linux
from ddplaunch.system import cgroup
linux.become_subreaper()
home = pathlib.Path(os.environ["HOME_CGROUP"])
# The kernel has one hierarchy, of which every mount shows all: tests that run at the same time need a tag each.
tag = home.name.rpartition("-")[2]
soon = lambda: time.monotonic() + 30

def pids(folder):
    return [int(word) for path in folder.rglob("cgroup.procs") for word in path.read_text().split()]

def start(folder, *arguments):
    argv = [sys.executable, "-S", "-E", "{PROGRAMS}/run_away.py", str(folder), *arguments]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"ready")
    return process

def tell(*values):
    print(json.dumps(values))
"""

IN_OWN_NAMESPACE = ["unshare", "--cgroup", "--mount", "sh", "-c"]


@dataclass
class Lab:
    """A cgroup below the root of the hierarchy, and a folder to mount that at."""

    mount: Path
    home: Path

    def sh(self, source: str, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run ``source`` where nothing it mounts is seen from outside; ``argv`` is its ``$@``."""
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", source, "sh", *argv],
            env=environment({"LAB": str(self.mount), "HOME_CGROUP": str(self.home)}),
            text=True,
            capture_output=True,
            timeout=TIMEOUT_S,
        )

    def run(self, source: str, *under: str) -> list[Any]:
        """Run Python code in the lab's cgroup, by the command ``under`` if there is one; what it told."""
        done = self.sh(ENTER, *under, sys.executable, "-c", PRELUDE + source)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mounting a cgroup v2 hierarchy needs root and unshare")
    lab = Lab(tmp_path / "cgroup2", tmp_path / "cgroup2" / f"ddplaunch-test-{uuid.uuid4().hex}")
    lab.mount.mkdir()
    tried = lab.sh(ENTER, "test", "-e", str(lab.home / "cgroup.kill"))
    try:
        if tried.returncode != 0:
            pytest.skip(f"no cgroup v2 with cgroup.kill (Linux 5.14) can be mounted here: {tried.stderr}")
        yield lab
    finally:
        wait_until(lambda: lab.sh(EMPTY).returncode == 0, 20, f"{lab.home.name} cannot be removed")


def test_what_hides_in_sessions_without_environment_or_by_forking_for_ever_is_gone_after_one_write(lab: Lab) -> None:
    before, after, leader, removed, exists, own = lab.run(
        """
made, reason = cgroup.create(tag)
assert made and not reason, reason
assert made.parent.samefile(home)
worker = start(made)
before = len(pids(made))
cgroup.kill(made)
leader = worker.wait(30)
removed = cgroup.remove(made, soon())
tell(before, pids(home), leader, removed, made.exists(), os.getpid())
"""
    )
    assert before >= 3
    assert after == [own], "only the one that killed the others is left"
    assert leader == -9
    assert (removed, exists) == (True, False)


def test_killing_twice_or_what_is_gone_does_no_harm(lab: Lab) -> None:
    assert lab.run(
        """
made, _ = cgroup.create(tag)
cgroup.kill(made)
second = start(made, "bounded")  # The attempt after one that was killed.
alive = second.poll() is None
cgroup.kill(made)
cgroup.kill(made)
second.wait(30)
first, again = cgroup.remove(made, soon()), cgroup.remove(made, soon())
cgroup.kill(made)
tell(alive, first, again)
"""
    ) == [True, True, True]


def test_removing_gives_up_at_the_deadline_and_kills_nothing(lab: Lab) -> None:
    assert lab.run(
        """
made, _ = cgroup.create(tag)
worker = start(made, "bounded")
tell(cgroup.remove(made, time.monotonic()), cgroup.remove(made, time.monotonic() + 0.2), worker.poll(), made.exists())
cgroup.kill(made)
"""
    ) == [False, False, None, True]


def test_removing_wakes_up_when_the_last_process_ends_and_takes_the_cgroups_below_too(lab: Lab) -> None:
    assert lab.run(
        """
made, _ = cgroup.create(tag)
below = made / "of the worker" / "deeper"
below.mkdir(parents=True)
workers = [start(made, "bounded"), start(below, "bounded")]
threading.Timer(0.2, cgroup.kill, [made]).start()
started_s = time.monotonic()
tell(cgroup.remove(made, started_s + 50), made.exists(), time.monotonic() - started_s < 25)
"""
    ) == [True, False, True]


def test_after_its_agent_was_killed_a_run_is_ended_from_another_session(lab: Lab) -> None:
    left, exists, spared = lab.run(
        """
def agent(session, mark):
    folder = home / session
    folder.mkdir()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        (folder / "cgroup.procs").write_text("0")
        made, _ = cgroup.create(mark)
        start(made, *([] if mark == tag else ["bounded"]))
        os.write(writer, str(made).encode())
        signal.pause()
    path = pathlib.Path(os.read(reader, 4096).decode())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return path

lost = [agent("session-1.scope", tag), agent("session-2.scope", tag)]
others = [
    agent("session-3.scope", f"{tag}-1"),
    agent("session-4.scope", tag[:-1]),
    agent("session-5.scope", f"{tag}-1-2"),
]
left = cgroup.kill_tagged(tag, soon())
tell(left, [path.exists() for path in lost], [len(pids(path)) for path in others])
for path in others:
    cgroup.kill(path)
"""
    )
    assert left == []
    assert exists == [False, False]
    assert spared == [3, 3, 3], "runs whose marks only begin alike"


def test_a_leftover_with_our_name_is_taken_over(lab: Lab) -> None:
    assert lab.run(
        """
first, second = cgroup.create(tag), cgroup.create(tag)
tell(first == second, cgroup.remove(first[0], soon()))
"""
    ) == [True, True]


def test_empty_leftovers_of_agents_that_are_gone_are_removed_and_no_others(lab: Lab) -> None:
    expected, left = lab.run(
        """
def agent(end):
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        made, _ = cgroup.create(f"{tag}-{end}")
        if end == "with a process":
            start(made, "bounded")
        os.write(writer, str(made).encode())
        signal.pause()
    path = pathlib.Path(os.read(reader, 4096).decode())
    if end != "alive":
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return path

gone, busy, alive = agent("gone"), agent("with a process"), agent("alive")
made, _ = cgroup.create(tag)
tell(sorted(path.name for path in (busy, alive, made)), sorted(path.name for path in home.glob("ddplaunch-*")))
for pid in pids(home):
    if pid != os.getpid():
        os.kill(pid, signal.SIGKILL)
"""
    )
    assert left == expected


def test_controllers_stay_as_they_are(lab: Lab) -> None:
    before, after = lab.run(
        """
controllers = lambda: [(folder / "cgroup.subtree_control").read_text() for folder in (home.parent, home)]
before = controllers()
cgroup.create(tag)
tell(before, controllers())
"""
    )
    assert before == after


def test_a_user_who_may_not_make_cgroups_is_told_why_and_a_delegated_one_is_used(lab: Lab) -> None:
    (refused, reason), (killed, removed) = lab.run(
        """
def as_nobody(function):
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        os.write(writer, json.dumps(function()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    return json.loads(os.read(reader, 4096))

def use():
    made, reason = cgroup.create(tag)
    assert made, reason
    reader, writer = os.pipe()
    if (worker := os.fork()) == 0:
        (made / "cgroup.procs").write_text("0")
        os.write(writer, b"in")
        signal.pause()
    os.read(reader, 2)
    cgroup.kill(made)
    return -os.waitpid(worker, 0)[1], cgroup.remove(made, soon())

refused = as_nobody(lambda: [str(value) for value in cgroup.create(tag)])
for name in (".", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"):  # As systemd's Delegate= does.
    os.chown(home / name, 65534, 65534)
tell(refused, as_nobody(use))
"""
    )
    assert refused == "None"
    assert "lets it create cgroups" in reason
    assert (killed, removed) == (-9, True)


def test_a_read_only_hierarchy_is_left_alone(lab: Lab) -> None:
    read_only = """
for mount in $(awk '/ - cgroup2 / { print $5 }' /proc/self/mountinfo); do
    mount -o remount,bind,ro "$mount" || exit
done
exec "$@"
"""
    made, reason, left = lab.run(
        "tell(str(cgroup.create(tag)[0]), cgroup.create(tag)[1], cgroup.kill_tagged(tag, soon()))",
        *("sh", "-c", read_only, "sh"),
    )
    assert (made, left) == ("None", [])
    assert reason


def test_a_cgroup_of_threads_is_left_alone(lab: Lab) -> None:
    made, reason = lab.run(
        """
(home / "threads").mkdir()
(home / "threads" / "cgroup.type").write_text("threaded")
(home / "threads" / "cgroup.procs").write_text("0")
made, reason = cgroup.create(tag)
tell(str(made), reason)
"""
    )
    assert made == "None"
    assert reason


def test_in_a_cgroup_namespace_only_a_mount_of_its_own_is_used(lab: Lab) -> None:
    old_mounts, reason = lab.run("tell(*map(str, cgroup.create(tag)))", *IN_OWN_NAMESPACE, 'exec "$@"', "sh")
    assert old_mounts == "None", "the mounts it came with begin above what it may see"
    assert reason
    mounted = 'mkdir "${LAB%/*}/own cgroup" && mount -t cgroup2 none "${LAB%/*}/own cgroup" && exec "$@"'
    assert lab.run(
        """
made, reason = cgroup.create(tag)
assert made, reason
worker = start(made)
cgroup.kill(made)
tell(str(made.parent), worker.wait(30), cgroup.remove(made, soon()))
""",
        *(*IN_OWN_NAMESPACE, mounted, "sh"),
    ) == [str(lab.mount.parent / "own cgroup"), -9, True]
