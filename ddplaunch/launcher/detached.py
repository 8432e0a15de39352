"""``--detach``: a run in a session of its own, which goes on without the shell, terminal and login that started it.

Runs in the process that the user started. What can fail at once fails there. Then it forks the launcher, looks at it
for the rest of a second, and ends. The launcher has no terminal: its standard streams are console.log.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

from ddplaunch.config import NO_LOGS
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.launcher import launch, setup
from ddplaunch.launcher.display import console_log
from ddplaunch.system import procfs
from ddplaunch.system.files import run_folder, run_json, script_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddplaunch.config import LaunchConfig

_RETURN_S, _LOOK_S = 0.7, 0.2
"""Seconds from the start of this process until it returns; so long, at least, it looks at the launcher."""

_SLOW_S, _POLL_S = 10.0, 0.05

_START_TIME = 19
"""Position of the start in ``procfs.stat``: clock ticks since the boot."""

_SHOWN_BYTES = 1 << 16


def start(config: LaunchConfig, show: Callable[[str], None], report: Callable[[str], None]) -> int:
    """Start the run and return 0 while it goes on; ``show`` prints its run id, ``report`` how to come back.

    If it ends at once, its exit code is returned. Returns a second time, in the launcher, with the run's exit code: the
    caller must exit with it.

    Raises:
        UsageError: a run that cannot be detached.
        LaunchError: the script is missing, there is no run folder, or no process can be started; in the launcher, as
            ``launch``.
    """
    _check(config)
    launch.check_files(config)
    run_id = config.run_id or run_folder.new_run_id()
    folder, warning = setup.create_run_folder(config, run_id)
    if folder is None:
        raise LaunchError(warning or "no run folder", "A run that is detached writes its output there. See --log-dir.")
    log = _create_log(folder)
    sys.stdout.flush()
    try:
        pid = os.fork()
    except OSError as error:
        raise LaunchError(f"the launcher cannot be started: {error.strerror}") from None
    if pid == 0:
        _leave(log)
        return launch.launch_detached(config, run_id, folder).exit_code
    return _after_start(pid, run_id, folder, config, show, report)


def _check(config: LaunchConfig) -> None:
    if config.task or config.rendezvous:
        raise UsageError(
            "--detach: not where every node has its own launcher",
            "One command can start all nodes: --hosts, or in SLURM without srun. A scheduler's job needs no --detach.",
        )
    if config.output.log_dir == NO_LOGS:
        raise UsageError("--detach: needs a run folder, and --log-dir is /dev/null", "Its output goes to console.log.")
    if config.transport == "local" and not config.chdir and config.entry == "script" and not config.text:
        script_file.check_readable(config.script, setup.local_host_name())


def _create_log(folder: Path) -> int:
    """Open console.log, which is made here so that its path is valid when it is shown."""
    path = folder / console_log.FILE
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None


# In the launcher.


def _leave(log: int) -> None:
    """Make this process the first of a session without a terminal, with ``log`` for its output."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, fd)
    # What this process has inherited is the shell's: its end would wait for a pipe that we keep open.
    kept = run_folder.held_fds()
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # That of the listing itself.
                os.close(fd)


# In the process that the user started.


def _after_start(
    pid: int,
    run_id: str,
    folder: Path,
    config: LaunchConfig,
    show: Callable[[str], None],
    report: Callable[[str], None],
) -> int:
    try:
        code = _exit_code(pid, max(_LOOK_S, _RETURN_S - _age_s()), folder / run_json.RUN)
    except KeyboardInterrupt:  # It has not returned yet: Ctrl-C is meant for the run.
        os.kill(pid, signal.SIGTERM)
        raise
    if code:
        sys.stderr.flush()
        os.write(2, _end_of(folder / console_log.FILE))
        return code
    show(run_id)
    where = f" --log-dir {config.output.log_dir}" if config.output.log_dir else ""
    if code is None:
        report(f"the run goes on without this terminal{_limit(config)}; its output: {folder / console_log.FILE}")
        report(f"to come back: ddplaunch --attach {run_id}{where}; to end it: ddplaunch --kill {run_id}")
    else:
        report(f"the run has succeeded already; its output: {folder / console_log.FILE}")
    return 0


def _limit(config: LaunchConfig) -> str:
    return f", until SLURM job {config.slurm_job.id} ends" if config.slurm_job else ""


def _exit_code(pid: int, timeout_s: float, first_file: Path) -> int | None:
    """The exit code of the child ``pid``; None if it goes on for ``timeout_s``, and has written its ``first_file``.

    On a slow machine that file comes later: without it other commands would not find the launcher.
    """
    now = time.monotonic()
    deadline, last = now + timeout_s, now + timeout_s + _SLOW_S
    with procfs.pidfd(pid) as fd:
        while now < deadline or (now < last and not first_file.exists()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            select.select([] if fd is None else [fd], [], [], _POLL_S)
            now = time.monotonic()
    return None


def _age_s() -> float:
    """Seconds since the start of this process; 0 if that is unknown."""
    fields = procfs.stat("self")
    started_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK") if fields else 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s if started_s else 0.0


def _end_of(path: Path) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _SHOWN_BYTES))
        return file.read()
    return b""
