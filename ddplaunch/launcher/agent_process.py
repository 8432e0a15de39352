"""The process of an agent on this machine, and the standard streams of the user's that it gets.

Light to import: the agent of a lone node is started first of all and loads its parts while the launcher loads its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ddplaunch
from ddplaunch import environ
from ddplaunch.working_folder import working_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddplaunch.config import LaunchConfig
    from ddplaunch.model import StreamName

_PACKAGE_ROOT = str(Path(ddplaunch.__file__).parent.parent)

# With PYTHONSAFEPATH (Python 3.11) no folder stands before the user's.
_START = (
    "import sys; sys.path[: not getattr(sys.flags, 'safe_path', False)] = [sys.argv[1]]; "
    "from ddplaunch.agent.main import main; main()"
)

COMMAND = (sys.executable, "-c", _START, _PACKAGE_ROOT)
"""Starts an agent here."""


@dataclass(frozen=True)
class AgentProcess:
    """An agent that reads its first record from its stdin.

    Attributes:
        fds: what it has inherited, by the streams' names, under the agent's own numbers.
    """

    process: subprocess.Popen[bytes]
    fds: Mapping[str, int]


def start(env: Mapping[str, str], fds: Mapping[str, int] | None = None, cwd: str | None = None) -> AgentProcess:
    """Start an agent in a session of its own: the terminal's Ctrl-C reaches the launcher alone. Closes ``fds``.

    Raises:
        OSError: this machine has no room for it, or no folder ``cwd``.
    """
    fds = fds or {}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            COMMAND, stdin=pipe, stdout=pipe, env=env, pass_fds=tuple(fds.values()), cwd=cwd, start_new_session=True
        )
    finally:
        for fd in fds.values():
            os.close(fd)
    return AgentProcess(process, fds)


def start_node(config: LaunchConfig, mark: str, is_first: bool) -> AgentProcess:
    """Start the agent of a node of the run; the first gets the user's stdin and, for a lone worker, the terminal.

    Raises:
        OSError: as ``start``.
        LaunchError: the working directory is gone.
    """
    if not config.chdir:
        working_folder()  # Without one the agent of Python 3.13.0 cannot even import socket (CPython's gh-130932).
    env = {**os.environ, **dict(config.remote.environ), environ.RUN_ID: mark}
    return start(env, _inherited(config) if is_first else {}, config.chdir)


@contextlib.contextmanager
def started_ahead(config: LaunchConfig, mark: str) -> Iterator[AgentProcess | None]:
    """The agent of a run that has but one, here; None of any other, or where it cannot be started. Killed at the end.

    Who needs it then starts it once more, and tells what is wrong.
    """
    agent = None
    if not config.hosts and not config.dry_run:
        with contextlib.suppress(OSError):
            agent = start_node(config, mark, is_first=True)
    try:
        yield agent
    finally:
        if agent:
            with agent.process:  # Closes its pipes, and waits.
                agent.process.kill()


def _inherited(config: LaunchConfig) -> dict[str, int]:
    copies = {name: os.dup(fd) for name, fd in _shared_terminals(config).items()}
    try:
        return {"stdin": os.dup(0), **copies}
    except OSError:  # It is closed.
        return copies


def _shared_terminals(config: LaunchConfig) -> dict[str, int]:
    """The standard streams a lone worker gets as they are: a terminal, unless the user asked for what needs a pipe."""
    return {name: fd for name, fd in (("stdout", 1), ("stderr", 2)) if os.isatty(fd) and not _is_piped(config, name)}


def _is_piped(config: LaunchConfig, name: str) -> bool:
    stream: StreamName = "stdout" if name == "stdout" else "stderr"
    filters = config.duplicate_stdout_filters if name == "stdout" else config.duplicate_stderr_filters
    hidden = config.show_ranks is not None or config.show_local_ranks is not None
    kept = config.tee.covers(0, stream) or config.redirects.covers(0, stream)
    read = config.hang_timeout_s is not None or any(injection.after_line for injection in config.injections)
    return kept or hidden or read or bool(filters or config.line_prefix)
