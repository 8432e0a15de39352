"""Starts an agent process on this machine, and decides which of the user's standard streams it inherits.

Runs in the launcher. Must import few modules: the agent of a single node is started first, and imports its modules
while the launcher imports the others.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Protocol

from ddplaunch import features
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import environment
from ddplaunch.protocol.agent_entry import AGENT_MODULE, COLLECT_SELDOM, IMPORT_PACKAGE, PACKAGE_ROOT
from ddplaunch.system.files.script_file import working_folder

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.protocol.results import StreamName

# Third-party packages may lie beside ours, in a folder that only the launcher has in its path.
_START = f"""{COLLECT_SELDOM}
{IMPORT_PACKAGE}; root in sys.path or sys.path.append(root); from {AGENT_MODULE} import main; main()"""

COMMAND = (sys.executable, "-c", _START, PACKAGE_ROOT)
"""Arguments of the process, unless it has another interpreter; shown by --plan."""


_END_S = 5.0
"""Seconds for an agent that a failed start of the launcher leaves behind."""


class Child(Protocol):
    """What a handle uses of ``Popen``: an agent is a child of this process, or a feature has offered it."""

    pid: int

    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None: ...


@dataclass(frozen=True)
class AgentProcess:
    """A started agent, which reads its first record from stdin.

    Attributes:
        inherited_fds: the agent's numbers of inherited descriptors, by stream name.
        kept: what a feature says of the agent that it offered, or why it had none, for ``-v``; empty: nothing.
        is_ready: it was offered by a feature, and has loaded its modules.
        has_spec: it has got its AgentSpec already.
    """

    process: Child
    inherited_fds: Mapping[str, int]
    kept: str = ""
    is_ready: bool = False
    has_spec: bool = False


def start(
    env: Mapping[str, str],
    inherited_fds: Mapping[str, int] | None = None,
    cwd: str | None = None,
    python: str | None = None,
) -> AgentProcess:
    """Start an agent in a new session: Ctrl-C in the terminal signals only the launcher.

    The agent inherits ``inherited_fds``; they are closed in this process. ``python``: its interpreter; None: that of
    this process.

    Raises:
        OSError: no room for a process, or no folder ``cwd``.
    """
    fds = inherited_fds or {}
    pipe = subprocess.PIPE
    try:
        words, passed = (python or COMMAND[0], *COMMAND[1:]), tuple(fds.values())
        process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, env=env, pass_fds=passed, cwd=cwd, start_new_session=True
        )
    finally:
        for fd in fds.values():
            os.close(fd)
    return AgentProcess(process, fds)


def start_node(config: LaunchConfig, node_tag: str, is_first: bool, stdout_fd: int) -> AgentProcess:
    """Start the agent of a node; the first one inherits the user's stdin and, for a single worker, the terminal.

    Raises:
        OSError: no room for a process, or no folder ``--chdir``.
        LaunchError: the working directory has been deleted.
    """
    if not config.chdir:
        working_folder()  # In a deleted folder, Python 3.13.0 cannot import socket (CPython issue 130932).
    fds = inherited(config, stdout_fd) if is_first else {}
    return start(environ(config, node_tag), fds, config.chdir, config.remote.python)


def environ(config: LaunchConfig, node_tag: str) -> dict[str, str]:
    """The environment of an agent on this machine."""
    return {**os.environ, **dict(config.remote.environ), environment.RUN_ID: node_tag}


def _start_or_take_over(
    config: LaunchConfig, run_tag: str, stdout_fd: int, meanwhile: Callable[[], None]
) -> AgentProcess:
    """Start the agent of the only node, or take over what a feature offers: an agent, or why it has none."""
    reason = ""
    for module in features.modules("early_agent"):
        offer: AgentProcess | str = module.offer(config, run_tag, stdout_fd, meanwhile)
        if isinstance(offer, AgentProcess):
            return offer
        reason = reason or offer
    agent = start_node(config, run_tag, is_first=True, stdout_fd=stdout_fd)
    return replace(agent, kept=reason)


@contextlib.contextmanager
def early_agent(
    config: LaunchConfig, run_tag: str, stdout_fd: int = 1, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[AgentProcess | None]:
    """Start the agent of a run with a single local node, and kill it when the block ends.

    ``meanwhile`` is called if another process is asked for the agent, while that works on its answer.

    Yields None for other runs, and if the agent cannot be started: the launcher then tries again and reports the error.
    """
    agent = None
    if not config.hosts and not config.dry_run:
        with contextlib.suppress(OSError):
            agent = _start_or_take_over(config, run_tag, stdout_fd, meanwhile)
    try:
        yield agent
    finally:
        if agent:
            _end(agent)


def _end(agent: AgentProcess) -> None:
    """End an agent that the run has not ended; one that may have workers stops them at the end of its input."""
    if agent.is_ready and agent.process.stdin:
        with contextlib.suppress(OSError):
            agent.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.process.wait(_END_S)
    agent.process.kill()
    agent.process.__exit__(None, None, None)  # Closes its pipes and reaps it.


def inherited(config: LaunchConfig, stdout_fd: int) -> dict[str, int]:
    """Copies of the descriptors that the first agent inherits, by stream name."""
    copies = {name: os.dup(fd) for name, fd in _shared_terminals(config, stdout_fd).items()}
    try:
        return {"stdin": os.dup(0), **copies}
    except OSError:  # stdin is closed.
        return copies


def _shared_terminals(config: LaunchConfig, stdout_fd: int) -> dict[str, int]:
    """Standard streams that a single worker inherits: terminals, unless an option needs the output in a pipe."""
    streams = {"stdout": stdout_fd, "stderr": 2}
    return {name: fd for name, fd in streams.items() if os.isatty(fd) and not _is_piped(config, name)}


def _is_piped(config: LaunchConfig, name: str) -> bool:
    stream: StreamName = "stdout" if name == "stdout" else "stderr"
    filters = config.output.duplicate_stdout_filters if name == "stdout" else config.output.duplicate_stderr_filters
    is_filtered = config.output.show_ranks is not None or config.output.show_local_ranks is not None
    is_logged = config.output.tee.covers(0, stream) or config.output.redirects.covers(0, stream)
    is_watched = config.timeouts.hang_timeout_s is not None or bool(config.injections)
    return is_logged or is_filtered or is_watched or bool(filters or config.output.line_prefix)
