"""``--detach``: a run in a session of its own, which goes on without the shell, terminal and login that started it.

Runs in the process that the user started. What can fail at once fails there. Then it forks the launcher, looks at it
for the rest of a second, and ends. The launcher has no terminal: its standard streams are console.log.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.features.runs import run_json
from ddplaunch.launcher import launch, setup
from ddplaunch.launcher.display import console_log
from ddplaunch.system import procfs
from ddplaunch.system.files import kept_files, run_folder, script_file

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


_RETURN_S, _LOOK_S = 0.7, 0.2
"""Seconds from the start of this process until it returns; so long, at least, it looks at the launcher."""

_READY_S, _SLOW_S, _POLL_S = 3.0, 10.0, 0.05
"""On a slow machine it waits so long for the agent's look at the script and the GPUs, and for the run's first file."""

_SHOWN_BYTES = 1 << 16

_SETTINGS = ("etc", "run", "usr/local/lib", "usr/lib")
"""Of the settings of systemd, the most important first."""

_LINGER = "var/lib/systemd/linger"
"""Has a file for each user whose services outlive the last logout."""

_SESSION, _USER_SERVICES = re.compile(rb"/session-[^/]+\.scope"), re.compile(rb"/user@\d+\.service")
_TRUE = ("1", "yes", "y", "true", "t", "on")
_WAY_OUT = "`loginctl enable-linger` once, then systemd-run --user --scope ddplaunch --detach ..."


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
    config = features.at_start(features.prepare(config))
    if config.begun:  # Its threads are not those of the launcher.
        config.begun.close()
        config = replace(config, begun=None)
    run_id = config.run_id or run_folder.new_run_id()
    folder, warning = setup.create_run_folder(config, run_id)
    if folder is None:
        raise LaunchError(warning or "no run folder", "A run that is detached writes its output there. See --log-dir.")
    log = _create_log(folder)
    flush()
    try:
        pid = os.fork()
    except OSError as error:
        raise LaunchError(f"the launcher cannot be started: {error.strerror}") from None
    if pid == 0:
        leave(log)
        return launch.launch_detached(config, run_id, folder).exit_code
    return _after_start(pid, run_id, folder, config, show, report)


def _check(config: LaunchConfig) -> None:
    if config.task or config.each_node_has_launcher:
        raise UsageError(
            "--detach: not where each node has a launcher",
            "One command can start all nodes: --hosts, or in SLURM without srun. A scheduler's job needs no --detach.",
        )
    if not config.output.keeps_files:
        raise UsageError("--detach: needs a run folder, and --log-dir is /dev/null", "Its output goes to console.log.")
    if config.workers.debug_on_error:
        raise UsageError("--detach cannot be combined with --debug-on-error", "A debugger needs a terminal.")
    if config.is_local and not config.chdir and config.script_file:
        script_file.check_readable(config.script, setup.local_host_name())


def _create_log(folder: Path) -> int:
    """Open console.log, which is made here so that its path is valid when it is shown."""
    path = folder / console_log.FILE
    try:
        return kept_files.open_to_append(path)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None


# In the launcher.


def leave(log: int) -> None:
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
        code = _exit_code(pid, max(_LOOK_S, _RETURN_S - procfs.age_s("self")), folder, is_local=config.is_local)
    except KeyboardInterrupt:  # It has not returned yet: Ctrl-C is meant for the run.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        report(f"stopping run {run_id}")
        raise
    if code:
        flush()
        os.write(2, end_of(folder / console_log.FILE))
        if not os.path.exists(folder / run_folder.RUN):  # The run has not begun.
            shutil.rmtree(folder, ignore_errors=True)
        return code
    _show_id(run_id, show)
    if code is None:
        report(f"the run goes on without this terminal{_limit(config)}; its output: {folder / console_log.FILE}")
        report(f"to come back: ddplaunch --attach {run_id}{_where(folder)}; to end it: ddplaunch --kill {run_id}")
        if problem := ends_at_logout():
            report(f"warning: {problem}")
    else:
        report(f"the run has succeeded already; its output: {folder / console_log.FILE}")
    return 0


def _show_id(run_id: str, show: Callable[[str], None]) -> None:
    try:
        show(run_id)
    except OSError as error:
        # What stdout's buffer still holds must not fail again at the exit of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        hint = f"To come back: ddplaunch --attach {run_id}."
        raise LaunchError(f"run {run_id} has started, but stdout cannot be written: {error.strerror}", hint) from None


def _where(folder: Path) -> str:
    """The option with which the folder is found also after the end of the run; empty if it is in the default place."""
    is_default = folder.parent == run_folder.base_at_home(os.environ)
    return "" if is_default else f" --log-dir {shlex.quote(str(folder.parent))}"


def _limit(config: LaunchConfig) -> str:
    return f", until SLURM job {config.slurm_job.id} ends" if config.slurm_job else ""


def flush() -> None:
    """Write what this process has printed: a fork has a copy of the buffers."""
    for stream in (sys.stdout, sys.stderr):
        if stream:  # Not closed when Python started.
            stream.flush()


def _exit_code(pid: int, least_s: float, folder: Path, *, is_local: bool) -> int | None:
    """The exit code of the child ``pid``; None if it goes on for ``least_s``, and as far as ``_has_begun`` says."""
    begun = time.monotonic()
    with procfs.pidfd(pid) as fd:
        while (passed_s := time.monotonic() - begun) < least_s or not _has_begun(folder, passed_s, is_local=is_local):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            select.select([] if fd is None else [fd], [], [], _POLL_S)
    return None


def _has_begun(folder: Path, passed_s: float, *, is_local: bool) -> bool:
    """Whether other commands find the launcher and, if all nodes are on this machine, an agent has no objection.

    True if that takes longer than it should.
    """
    if not os.path.exists(folder / run_folder.RUN):
        return passed_s > _SLOW_S
    events = procfs.read(str(folder / run_json.EVENTS))
    return not is_local or passed_s > _READY_S or b'"agent_ready"' in events or b'"gpus_awaited"' in events


def end_of(path: Path) -> bytes:
    with contextlib.suppress(OSError), kept_files.open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _SHOWN_BYTES))
        return file.read()
    return b""


# Whether systemd ends this process when its user logs out, as far as files tell it: logind.conf(5), loginctl(1).


def ends_at_logout(root: Path = Path("/")) -> str:
    """Why a logout ends this process, and what to do; empty if it does not, or if that cannot be known.

    ``root`` is the folder that has /etc, /proc and the others.
    """
    cgroup = procfs.read(str(root / "proc/self/cgroup"))
    if _SESSION.search(cgroup):
        is_ended = _kills_processes_of(_user_name(), _settings(root))
        return f"a logout ends this run: logind has KillUserProcesses=yes. {_WAY_OUT}" if is_ended else ""
    if _USER_SERVICES.search(cgroup) and not os.path.exists(root / _LINGER / _user_name()):
        return "the last logout ends this run with the user's services: `loginctl enable-linger` keeps them"
    return ""


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # As in a container with an arbitrary user id.
        return str(os.getuid())


def _kills_processes_of(user: str, settings: dict[str, str]) -> bool:
    excluded, only = (settings.get(key, "").split() for key in ("KillExcludeUsers", "KillOnlyUsers"))
    if "KillExcludeUsers" not in settings:
        excluded = ["root"]
    # Without a setting it depends on how systemd was compiled; distributions choose no.
    is_on = settings.get("KillUserProcesses", "").lower() in _TRUE
    return is_on and user not in excluded and (not only or user in only)


def _settings(root: Path) -> dict[str, str]:
    """The last assignment of each key: those of logind.conf come before those of logind.conf.d, by name."""
    whole = [root / folder / "systemd/logind.conf" for folder in _SETTINGS]
    parts: dict[str, Path] = {}
    for folder in reversed(_SETTINGS):  # A file hides those of its name that are less important.
        parts.update({path.name: path for path in (root / folder / "systemd/logind.conf.d").glob("*.conf")})
    paths = [*[path for path in whole if os.path.isfile(path)][:1], *(parts[name] for name in sorted(parts))]
    lines = [line for path in paths for line in procfs.read(str(path)).decode("utf-8", "replace").splitlines()]
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith(("#", ";")))
    return {key.strip(): value.strip() for key, is_set, value in pairs if is_set}
