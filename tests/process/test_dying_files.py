"""No file operation of ours changes how a run ends: each fails in turn, and then all from one moment on."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

import ddplaunch
from tests.support.dying_files import JOB, DyingFiles
from tests.support.runs import Finished, run

PACKAGE = Path(ddplaunch.__file__).parent
ERRNOS = ("ENOTCONN", "ESTALE", "EIO", "ENOSPC", "EROFS", "EACCES", "ENAMETOOLONG")
FAILS = ("1=raise:the cause",)

JOBS = {
    "succeeds": (("*=code:0",), 0, ""),
    "fails": (("1=code:7",), 7, "failed: exit code 7"),
    "raises": (FAILS, 1, "failed: RuntimeError: the cause"),
    "is restarted": (("--max-restarts=1", "*=code:3,code:0"), 0, "restart 1 of 1"),
}
"""Arguments, exit code, and what stderr says of rank 0 or 1."""


def number(name: str) -> int:
    return int(getattr(errno, name))


def assert_ended(finished: Finished, code: int, said: str) -> None:
    assert finished.returncode == code, finished.err
    assert said in finished.err
    assert finished.err.count("ddplaunch: the job failed") == (code != 0)
    assert f'File "{PACKAGE}' not in finished.err


def is_told(operation: str) -> bool:
    """A worker whose error file alone fails tells nobody; the page then has the traceback from its log."""
    return "/1/.error.json" not in operation and operation != "rename ddplaunch/r1/attempt_0/1/error.json"


def fail_each(folder: Path, operations: list[str], errno_names: tuple[str, ...], said: str) -> None:
    """Some operations fail in one run; those that were not tried, because others had failed before, in another."""
    left = operations
    for run_number in range(len(operations)):
        disk, errno_name = DyingFiles(folder / f"{run_number}"), errno_names[run_number % len(errno_names)]
        group = left[:: 1 + len(left) // 32]
        log = {"log": str(disk.folder / "log")}
        finished = disk.run(*FAILS, errno=number(errno_name), only="\n".join(group), **log)
        try:
            assert_ended(finished, 1, said)
        except AssertionError as error:
            raise AssertionError(f"{errno_name} in {group}") from error
        failed = {*disk.logged()} & {*group} or {*group}
        left = [operation for operation in left if operation not in failed]
        if not left:
            return


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_any_operation_may_fail(tmp_path: Path, part: int) -> None:
    """Those of a real run; the parts are for tests in parallel, and each run has another errno."""
    operations = DyingFiles(tmp_path / "recorded").operations(*FAILS)
    assert len(operations) > 80, "the library has not seen the run"
    told, untold = ([each for each in operations if is_told(each) is known] for known in (True, False))
    fail_each(tmp_path / "told", told[part::2], ERRNOS[3 * part :], "failed: RuntimeError: the cause")
    fail_each(tmp_path / "untold", untold[part::2], ERRNOS[2 * part :], "| RuntimeError: the cause")


@pytest.mark.parametrize(("name", "job"), [*zip(ERRNOS[:4], JOBS, strict=True)])
def test_a_file_system_may_die_during_a_run(tmp_path: Path, name: str, job: str) -> None:
    arguments, code, said = JOBS[job]
    disk = DyingFiles(tmp_path)
    finished = disk.run(*arguments, errno=number(name), trigger=str(tmp_path / "dead"))
    assert_ended(finished, code, said)
    assert finished.out.count("] the disk is dead\n") > ("restart" in job)
    reason = os.strerror(number(name))
    (told,) = [line for line in finished.err.splitlines() if "not written, or only in part" in line]
    assert told.startswith(f"ddplaunch: not written, or only in part, in {tmp_path}/state/ddplaunch/r1: ")
    assert told.endswith(f": {reason}")
    assert "report.json" in told
    assert f": {reason}; the job goes on, but its logs on " in finished.err


@pytest.mark.parametrize(
    ("side", "job"),
    [("launcher", "succeeds"), ("launcher", "is restarted"), ("node", "fails"), ("node", "is restarted")],
)
def test_the_file_system_of_one_side_may_die(tmp_path: Path, side: str, job: str) -> None:
    arguments, code, said = JOBS[job]
    disk = DyingFiles(tmp_path)
    finished = disk.run(*arguments, errno=errno.ENOTCONN, trigger=str(tmp_path / "dead"), side=side)
    assert_ended(finished, code, said)
    assert ("not written, or only in part" in finished.err) == (side == "launcher")
    assert ("but its logs on " in finished.err) == (side == "node")


@pytest.fixture
def ext4(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A folder, and the command under which an ext4 file system is mounted there; nothing stays mounted."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    script = 'mount -o loop "$0" "$1" && shift && exec "$@"'
    under = ("unshare", "--mount", "sh", "-c", script, str(image), str(folder))
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        subprocess.run([*under, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no ext4 can be mounted here: {error}")
    return folder, under


@pytest.mark.parametrize("job", ["succeeds", "raises"])
def test_a_real_file_system_may_die(ext4: tuple[Path, tuple[str, ...]], job: str) -> None:
    folder, under = ext4
    arguments, code, said = JOBS[job]
    options = [argument for argument in arguments if argument.startswith("-")]
    ends = [argument for argument in arguments if not argument.startswith("-")]
    finished = run("--nproc-per-node=2", "--log-dir", folder, *options, JOB, folder, *ends, under=under)
    assert_ended(finished, code, said)
    assert re.search(r"not written, or only in part, in .*report.json.*: Input/output error$", finished.err)


def test_a_file_system_that_is_dead_from_the_start_is_told_once(tmp_path: Path) -> None:
    finished = DyingFiles(tmp_path).run(*FAILS, errno=errno.ESTALE)
    assert_ended(finished, 1, "failed: RuntimeError: the cause")
    assert finished.err.count(os.strerror(errno.ESTALE)) == 1
