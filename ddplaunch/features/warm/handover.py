"""Turns a fork of the keeper into the agent of a run, and a fork of that into its forkserver.

All that a started process gets from the command is set here: descriptors, working directory, umask, environment,
session. What cannot be set was compared before (``features.warm.surroundings``).
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ddplaunch.features.warm import surroundings
from ddplaunch.features.warm.imports import Imports, forget_folders, user_folders
from ddplaunch.features.warm.records import FIRST_INHERITED, TAKEOVER_FDS, KeeperRequest
from ddplaunch.protocol import environment
from ddplaunch.protocol.agent_entry import AGENT_MODULE, PACKAGE_ROOT
from ddplaunch.protocol.specs import ForkserverUnfit
from ddplaunch.system import linux, procfs
from ddplaunch.worker import forkserver

if TYPE_CHECKING:
    from ddplaunch.worker.forkserver import Continuation

READY = "ready"
"""What the new agent writes to the keeper once it can be found by its run tag; any other text is why it has ended."""


def become_agent(
    request: KeeperRequest, fds: list[int], client: int, report: int, imports: Imports, own_path: list[str]
) -> Continuation:
    """Make this fork of the keeper an agent, and fork its forkserver. Returns what the process must run.

    ``fds`` are those of the request, ``client`` is the connection to the process that sent it. Never raises: an error
    ends this process, which the keeper answers.
    """
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        env = surroundings.read_environ(fds.pop(TAKEOVER_FDS - 1))
        report, client = _place_descriptors(fds, report, client)
        os.umask(request.umask)
        # Before anything else is started: a sweep must find all processes of the run by their environment.
        linux.set_command_line(list(request.argv), env)
        tag = f"{environment.RUN_ID}={env.get(environment.RUN_ID)}".encode()
        if tag not in procfs.read("/proc/self/environ").split(b"\0"):
            _give_up(report, "this kernel does not let a process show another environment (PR_SET_MM_MAP)")
        return _fork_forkserver(request, env, report, client, imports, own_path)
    except BaseException as error:
        _give_up(report, f"{type(error).__name__}: {error}")


def _give_up(report: int, reason: str) -> NoReturn:
    os.write(report, reason.encode(errors="replace")[:300])
    os._exit(1)


def _place_descriptors(fds: list[int], report: int, client: int) -> tuple[int, int]:
    """Stdin, stdout, stderr, then the inherited ones from ``FIRST_INHERITED`` on; all others are closed.

    ``fds``: those of the request, without the file of the environment.

    Returns the new numbers of ``report`` and ``client``.
    """
    streams, folder, inherited = fds[:FIRST_INHERITED], fds[FIRST_INHERITED], fds[FIRST_INHERITED + 1 :]
    os.fchdir(folder)
    kept = [*streams, *inherited, report, client]
    for number, fd in enumerate([os.dup(fd) for fd in kept]):
        os.dup2(fd, number)
    os.closerange(len(kept), _open_files())
    return len(kept) - 2, len(kept) - 1


def _open_files() -> int:
    return min(os.sysconf("SC_OPEN_MAX"), 1 << 20)


def _fork_forkserver(
    request: KeeperRequest, env: dict[str, str], report: int, client: int, imports: Imports, own_path: list[str]
) -> Continuation:
    ours, theirs = socket.socketpair()
    agent_pid = os.getpid()
    pid = forkserver.quiet_fork()
    if pid == 0:
        linux.die_with_parent(agent_pid)
        ours.detach()
        return _forkserver(theirs.detach(), imports)
    theirs.close()
    os.environ.clear()
    os.environ.update(env)
    forkserver.reinitialize()
    sys.path[:] = own_path if PACKAGE_ROOT in own_path else [*own_path, PACKAGE_ROOT]
    signal.alarm(request.alarm_s)
    os.write(report, READY.encode())
    os.close(report)
    _wait_for_consent(client)
    return partial(_run_agent, pid, ours.detach())


def _wait_for_consent(client: int) -> None:
    """End this process unless the other one still wants it: after its time limit it has started another agent.

    Two agents must not read one stdin. The launcher sends a byte once it knows of this agent, and closes the connection
    if it will not.
    """
    select.select([client], [], [])  # The keeper has made the connection non-blocking.
    if not os.read(client, 1):
        os._exit(1)
    os.close(client)


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
    forget_folders()
    _adopt_folder()
    return forkserver.serve(sock, spec)


def _adopt_folder() -> None:
    """Give modules that noted the working directory when they were imported that of the run."""
    sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo:
        dynamo.debug_dir_root = dynamo.default_debug_dir_root()


def _unfit(imports: Imports, env: dict[str, str], script_dir: str) -> str:
    if name := imports.difference(surroundings.digests(env)):
        return f"the environment variable {name} has changed"
    hidden_by = imports.hidden_by([*filter(None, [script_dir]), *user_folders()])
    return f"{hidden_by} would hide a module" if hidden_by else ""
