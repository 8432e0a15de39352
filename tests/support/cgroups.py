"""A cgroup of its own with a limit, v1 or v2, for what only the kernel's own refusal can show."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

_MOUNT = Path("/sys/fs/cgroup")


def cannot_run(reason: str) -> NoReturn:
    """Skip on a laptop; fail where everything must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def limited(controller: str, **limits: int) -> Iterator[Path]:
    """A cgroup with ``limits``, names of the files of ``controller``; what is not there is left out."""
    is_v1 = (_MOUNT / controller).is_dir()
    folder = (_MOUNT / controller if is_v1 else _MOUNT) / f"ddplaunch-test-{os.getpid()}"
    try:
        try:
            if not is_v1:
                (_MOUNT / "cgroup.subtree_control").write_text(f"+{controller}")
            folder.mkdir()
            for name, value in limits.items():
                path = folder / f"{controller}.{name}"
                if path.exists():
                    path.write_text(str(value))
        except OSError as error:
            cannot_run(f"no {controller} cgroup can be made here: {error}")
        yield folder
    finally:
        _remove(folder)


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[Path]:
    """One with room for so much, swap included; by the names of v1 and of v2."""
    names = {"limit_in_bytes": nbytes, "memsw.limit_in_bytes": nbytes, "max": nbytes, "swap.max": 0}
    with alone("memory"), limited("memory", **names) as folder:
        yield folder


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Wait until no other test of this machine is in such a block: the kernel counts kills for memory of all."""
    with open(Path(tempfile.gettempdir(), f"ddplaunch-tests-{name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def inside(folder: Path) -> tuple[str, ...]:
    """The beginning of a command that runs the rest in the cgroup."""
    return ("sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh")


def _remove(folder: Path, timeout_s: float = 10) -> None:
    """Kill what is in it and remove it; a cgroup stays busy until its dead are reaped."""
    deadline = time.monotonic() + timeout_s
    while folder.exists():
        for pid in map(int, (folder / "cgroup.procs").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
