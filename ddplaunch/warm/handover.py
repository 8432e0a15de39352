"""Turns a fork of the keeper into the agent of a run, and a fork of that into its forkserver.

All that a started process gets from the command is set here: descriptors, working directory, umask, environment,
session. What cannot be set was compared before (``system.surroundings``).
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ddplaunch.protocol import environment
from ddplaunch.protocol.agent_entry import AGENT_MODULE, PACKAGE_ROOT
from ddplaunch.protocol.keeper import FIRST_INHERITED, TAKEOVER_FDS
from ddplaunch.protocol.specs import ForkserverUnfit
from ddplaunch.system import linux, procfs
from ddplaunch.warm.imports import user_folders
from ddplaunch.worker import after_fork, forkserver

if TYPE_CHECKING:
    from ddplaunch.protocol.keeper import Takeover
    from ddplaunch.warm.imports import Imports
    from ddplaunch.worker.forkserver import Continuation

READY = "ready"
"""What the new agent writes to the keeper once it can be found by its run tag; any other text is why it has ended."""


def become_agent(request: Takeover, fds: list[int], report: int, imports: Imports, own_path: list[str]) -> Continuation:
    """Make this fork of the keeper an agent, and fork its forkserver. Returns what the process must run.

    Never raises: an error ends this process, which the keeper answers.
    """
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        report = _place_descriptors(fds, report)
        os.umask(request.umask)
        # Before anything else is started: a sweep must find all processes of the run by their environment.
        linux.set_command_line(list(request.argv), request.env)
        tag = f"{environment.RUN_ID}={request.env.get(environment.RUN_ID)}".encode()
        if tag not in procfs.read("/proc/self/environ").split(b"\0"):
            _give_up(report, "this kernel does not let a process show another environment (PR_SET_MM_MAP)")
        return _fork_forkserver(request, report, imports, own_path)
    except BaseException as error:
        _give_up(report, f"{type(error).__name__}: {error}")


def _give_up(report: int, reason: str) -> NoReturn:
    os.write(report, reason.encode(errors="replace")[:300])
    os._exit(1)


def _place_descriptors(fds: list[int], report: int) -> int:
    """Stdin, stdout, stderr, then the inherited ones from ``FIRST_INHERITED`` on; all others are closed.

    Returns the new number of ``report``.
    """
    streams, folder, inherited = fds[: TAKEOVER_FDS - 1], fds[TAKEOVER_FDS - 1], fds[TAKEOVER_FDS:]
    os.fchdir(folder)
    kept = [*streams, *inherited, report]
    for number, fd in enumerate([os.dup(fd) for fd in kept]):
        os.dup2(fd, number)
    os.closerange(len(kept), _open_files())
    assert len(streams) == FIRST_INHERITED
    return len(kept) - 1


def _open_files() -> int:
    return min(os.sysconf("SC_OPEN_MAX"), 1 << 20)


def _fork_forkserver(request: Takeover, report: int, imports: Imports, own_path: list[str]) -> Continuation:
    ours, theirs = socket.socketpair()
    agent_pid = os.getpid()
    pid = forkserver.quiet_fork()
    if pid == 0:
        linux.die_with_parent(agent_pid)
        ours.detach()
        return _forkserver(theirs.detach(), imports)
    theirs.close()
    os.environ.clear()
    os.environ.update(request.env)
    after_fork.reinitialize()
    sys.path[:] = own_path if PACKAGE_ROOT in own_path else [*own_path, PACKAGE_ROOT]
    signal.alarm(request.alarm_s)
    os.write(report, READY.encode())
    os.close(report)
    return partial(_run_agent, pid, ours.detach())


def _run_agent(forkserver_pid: int, forkserver_fd: int) -> NoReturn:
    code = 1
    try:
        importlib.import_module(AGENT_MODULE).main((forkserver_pid, forkserver_fd))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # The interpreter's end would destroy torch's modules, which takes long.


def _forkserver(fd: int, imports: Imports) -> Continuation:
    """Make this process the forkserver: only its socket and stderr stay open."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.dup2(fd, 3, inheritable=False)
    os.closerange(4, _open_files())
    return _serve(socket.socket(fileno=3), imports)


def _serve(sock: socket.socket, imports: Imports) -> Continuation:
    changed = imports.changed_file()  # While the launcher loads its modules.
    spec = forkserver.first_record(sock)
    if spec is None or spec.env is None:
        os._exit(0)
    reason = f"{changed} has changed" if changed else _unfit(imports, spec.env, spec.script_dir)
    if reason:
        forkserver.answer(sock, ForkserverUnfit(reason))
        os._exit(0)
    forkserver.adopt_environ(spec.env)
    return forkserver.serve(sock, spec)


def _unfit(imports: Imports, env: dict[str, str], script_dir: str) -> str:
    if name := imports.difference(env):
        return f"the environment variable {name} has changed"
    hidden_by = imports.hidden_by([*filter(None, [script_dir]), *user_folders()])
    return f"{hidden_by} would hide a module" if hidden_by else ""
