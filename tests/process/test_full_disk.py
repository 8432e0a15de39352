"""A log folder that is full or cannot be written to costs one warning: training goes on and the console has it all."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.cgroups import cannot_run
from tests.support.runs import PROGRAMS, Finished, run

FLOOD, WRITE, EXIT_WITH = PROGRAMS / "flood.py", PROGRAMS / "write.py", PROGRAMS / "exit_with.py"
BARE = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}| "}
TWO = ("--nproc-per-node", "2")
FILL = '{ head -c 2000000 /dev/zero >"$0/zeros" 2>&1 || :; } 2>&-'


class Disk:
    """A file system of its own in a mount namespace that ends with the run in it: nothing stays mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def under(self, options: str, prepare: str = ":") -> tuple[str, ...]:
        """What a command is to be run by. ``prepare`` is a shell command that finds the folder in ``$0``."""
        as_root = () if os.geteuid() == 0 else ("--map-root-user",)
        script = f'mount -t tmpfs -o {options} none "$0" && {prepare} && exec "$@"'
        return ("unshare", "--mount", *as_root, "sh", "-c", script, str(self.folder))

    def run(self, options: str, *arguments: str | Path, prepare: str = ":", log_dir: str = "") -> Finished:
        """Run ddplaunch with its logs on this disk."""
        folder = self.folder / log_dir if log_dir else self.folder
        return run("--log-dir", folder, *arguments, env=BARE, under=self.under(options, prepare))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = Disk(tmp_path / "disk")
    try:
        subprocess.run([*disk.under("size=1m"), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        cannot_run(f"no private mount can be made here: {error}")
    return disk


def warnings(finished: Finished) -> list[str]:
    """What we said besides where the logs are, the success and, in the last line, what is missing in the folder."""
    said = [line for line in finished.err.splitlines() if line.startswith("ddplaunch: ")]
    said = said[:-1] if said and said[-1].startswith("ddplaunch: not written, or only in part, in ") else said
    return [line for line in said if not re.match(r"ddplaunch: (\d+ workers on |succeeded after )", line)]


def test_a_disk_that_fills_up_stops_nothing_and_is_told_once(disk: Disk) -> None:
    """torchrun: tail_log_test 4."""
    finished = disk.run("size=1m", "--nproc-per-node", "2", FLOOD, "20000", "100")
    assert finished.returncode == 0
    assert len(warnings(finished)) == 1
    assert "No space left on device; the job goes on" in warnings(finished)[0]
    assert str(disk.folder) in warnings(finished)[0]
    assert re.search(r"not written, or only in part, in .*events.jsonl.*: No space left on device$", finished.err)
    for rank in range(2):
        numbers = re.findall(rf"^{rank}\| {rank}:(\d+) x+$", finished.out, re.MULTILINE)
        assert [int(number) for number in numbers] == list(range(20_000))
    assert finished.err.count(" error\n") == 4000


def test_a_disk_that_is_full_from_the_start_stops_nothing(disk: Disk) -> None:
    finished = disk.run("size=1m", *TWO, FLOOD, "1000", "100", prepare=FILL)
    assert finished.returncode == 0
    assert len(warnings(finished)) == 1
    assert "No space left on device" in warnings(finished)[0]
    assert len(finished.out.splitlines()) == 2000


@pytest.mark.parametrize(
    ("options", "reason"),
    [("size=1m,nr_inodes=1", "No space left on device"), ("ro", "Read-only file system")],
    ids=["no inode left", "read-only"],
)
def test_a_folder_in_which_nothing_can_be_made_is_told_once(disk: Disk, options: str, reason: str) -> None:
    finished = disk.run(options, *TWO, WRITE, r"out:a\n")
    assert finished.returncode == 0
    assert sorted(finished.out.splitlines()) == ["0| a", "1| a"]
    complaints = [line for line in warnings(finished) if reason in line]
    assert complaints == [f"ddplaunch: no logs are kept: {disk.folder}: {reason}"]


def test_room_for_the_runs_folder_alone_is_told_once(disk: Disk) -> None:
    """Seven inodes: root, run, lock, run.json, console.log, attempt and the first worker's folder."""
    finished = disk.run("size=1m,nr_inodes=7", *TWO, WRITE, r"out:a\n")
    assert finished.returncode == 0
    assert len(warnings(finished)) == 1
    assert sorted(finished.out.splitlines()) == ["0| a", "1| a"]


def test_a_folder_that_may_not_be_written_to_is_told_once(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir(mode=0o500)
    # Root without the right to pass over permissions.
    under = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    finished = run(*TWO, "--log-dir", folder, WRITE, r"out:a\n", env=BARE, under=under)
    assert finished.returncode == 0
    assert sorted(finished.out.splitlines()) == ["0| a", "1| a"]
    assert [line for line in warnings(finished) if "ermission" in line] == [
        f"ddplaunch: no logs are kept: {folder}: Permission denied"
    ]


def test_restarts_go_on_with_a_full_disk_and_the_last_failure_has_its_page(disk: Disk) -> None:
    """The error file cannot be written; the last lines tell the cause."""
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    finished = disk.run("size=1m", *options, EXIT_WITH, "1=code:3,raise:the cause", prepare=FILL)
    assert finished.returncode == 1
    assert len([line for line in warnings(finished) if "No space left" in line]) <= 2
    assert "; restart 1 of 1\n" in finished.err
    assert "\nrank 1 on " in finished.err
    assert "  | RuntimeError: the cause\n" in finished.err
    assert 'Traceback (most recent call last):\n  File "<' not in finished.err


def test_without_any_writable_folder_a_job_runs_without_files(disk: Disk) -> None:
    # What is below them stays: this clone may be.
    read_only = [f"mount --rbind {each} {each} && mount -o remount,bind,ro {each}" for each in ("/tmp", "/var/tmp")]
    under = disk.under("ro", " && ".join([*read_only, "cd /proc"]))
    env = {**BARE, "HOME": "", "XDG_STATE_HOME": "", "TMPDIR": ""}
    finished = run("--nproc-per-node", "1", EXIT_WITH, "*=code:7", env=env, under=under)
    assert finished.returncode == 7, finished.err
    assert re.search(r"no logs are kept: /tmp/ddplaunch-\w+: Read-only file system", finished.err)


def test_jobs_of_a_sweep_end_as_always_and_what_is_not_written_is_said(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text("0\n3\n")
    words = ("--sweep", tmp_path / "jobs.txt", "--no-python", "sh", "-c", 'head -c 3000000 /dev/zero; exit "$1"', "sh")
    finished = disk.run("size=1m", *words)
    assert finished.returncode == 1
    assert [line.split()[:3] for line in finished.out.splitlines()[1:]] == [
        ["1", "succeeded", "0"],
        ["2", "failed", "3"],
    ]
    assert "warning: not written, or only in part, in" in finished.err
