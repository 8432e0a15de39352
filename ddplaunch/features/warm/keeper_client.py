"""Takes the agent of a run from a keeper that an earlier run has left on this machine, in place of starting one.

Runs in the launcher, and on another machine in the process that starts an agent there. A keeper that does not answer in
time, is used by another run or differs in any part costs its answer, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from ddplaunch.features.warm import keeper_files
from ddplaunch.protocol import environment

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from ddplaunch.features.warm.records import KeeperRequest


class KeptAgent:
    """An agent that a keeper has forked, with the methods of ``Popen`` that its handle uses.

    Attributes:
        stdin: the end of its stdin that this process writes to; None if another process has it.
        stdout: as ``stdin``, to read from.
    """

    def __init__(self, pid: int, pidfd: int, client: socket.socket) -> None:
        self.pid = pid
        self.stdin: BinaryIO | None = None
        self.stdout: BinaryIO | None = None
        self._pidfd, self._client = pidfd, client
        self._returncode: int | None = None

    def __enter__(self) -> KeptAgent:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(_LAST_S)
        self._client.close()
        os.close(self._pidfd)

    def send_signal(self, signum: int) -> None:
        """Send a signal; ignores an agent that has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def kill(self) -> None:
        """SIGKILL it; ignores an agent that has ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Returns its returncode, and -SIGKILL if the keeper that knows it has ended too.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        if self._returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"agent {self.pid}", timeout or 0)
            self._returncode = self._reported()
        return self._returncode

    def follow(self) -> NoReturn:
        """End this process when the agent ends, and as it ends; the agent alone has the standard streams."""
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        code = self.wait()
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)

    def _reported(self) -> int:
        from ddplaunch.features.warm.records import AgentGone
        from ddplaunch.protocol import fd_records, wire

        with contextlib.suppress(OSError, wire.ProtocolError):
            self._client.settimeout(_LAST_S)
            received = fd_records.receive(self._client, (AgentGone,), 0)
            if received:
                return int(received[0].returncode)
        return -signal.SIGKILL


_LAST_S = 2.0

TAKEN = "torch was imported by an earlier run (--keep-warm)"
ANEW = "torch is imported anew"


def take_over(
    path: Path,
    request: KeeperRequest,
    environ: Mapping[str, str],
    cwd: str,
    inherited: Sequence[int],
    meanwhile: Callable[[], None],
) -> KeptAgent | str:
    """Take over the keeper at ``path``: its agent talks through pipes.

    The agent has ``inherited`` from ``FIRST_INHERITED`` on. ``environ`` and ``cwd`` are the agent's environment, as in
    ``request``, and its working directory. ``meanwhile`` is
    called when the keeper has been asked: its answer takes some 30 ms. Returns the agent, or why there is none.
    """
    child_in, to_agent = os.pipe()
    from_agent, child_out = os.pipe()
    with os.fdopen(to_agent, "wb") as stdin, os.fdopen(from_agent, "rb") as stdout:
        try:
            agent = ask(path, request, environ, cwd, (child_in, child_out, 2), inherited, meanwhile)
        finally:
            os.close(child_in)
            os.close(child_out)
        if not isinstance(agent, str):
            agent.stdin, agent.stdout = _moved(stdin, "wb"), _moved(stdout, "rb")
        return agent


def take_over_here(start: Mapping[str, Any], facts: dict[str, Any]) -> KeptAgent | None:
    """As ``take_over``, in a process that was started over SSH: the agent gets its standard streams.

    ``start`` is what ``remote_start`` has sent; ``facts`` become those of the agent.
    """
    kept, path = start["kept"], keeper_files.path(os.environ)
    if path is None or not os.path.exists(path):
        if kept["seconds"] is not None:
            facts["kept"] = f"{ANEW}: {(path and keeper_files.reason(path)) or 'none was left yet'}"
        return None
    cwd, argv = os.getcwd(), tuple(sys.orig_argv)
    request = takeover(os.environ, cwd, tuple(kept["preload"]), kept["script"], argv, kept["seconds"])
    agent = ask(path, replace(request, alarm_s=start["first_record_s"]), os.environ, cwd, (0, 1, 2))
    if isinstance(agent, str):
        facts["kept"] = f"{ANEW}: {agent}"
        return None
    facts["kept"], facts["pid"] = TAKEN, agent.pid
    return agent


def _moved(stream: BinaryIO, mode: str) -> BinaryIO:
    return os.fdopen(os.dup(stream.fileno()), mode)  # type: ignore[return-value]


def found(*, is_wanted: bool) -> Path | str:
    """The socket of the keeper, or why there is none; that is empty where the user has not asked for one."""
    path = keeper_files.path(os.environ)
    if path is None:
        return "this user has no home" if is_wanted else ""
    if os.path.exists(path) and environment.RUN_ID not in os.environ:
        return path
    if not is_wanted:
        return ""
    if environment.RUN_ID in os.environ:
        return "this run was started by a process of another run"
    return keeper_files.reason(path) or "none was left yet"


def takeover(
    environ: Mapping[str, str],
    cwd: str,
    preload: tuple[str, ...],
    script: str,
    argv: tuple[str, ...],
    seconds: float | None,
) -> KeeperRequest:
    """What a run wants: an agent with this environment and working directory; see ``KeeperRequest`` for the others.

    ``script`` is absolute or in ``cwd``.
    """
    from ddplaunch.features.warm import surroundings
    from ddplaunch.features.warm.records import KeeperRequest

    umask = os.umask(0o077)
    os.umask(umask)
    return KeeperRequest(
        surroundings=surroundings.read(environ, cwd),
        env=surroundings.digests(environ),
        umask=umask,
        preload=preload,
        script=script and os.path.join(cwd, script),
        argv=argv,
        seconds=seconds,
    )


def ask(
    path: Path,
    request: KeeperRequest,
    environ: Mapping[str, str],
    cwd: str,
    streams: tuple[int, int, int],
    inherited: Sequence[int] = (),
    meanwhile: Callable[[], None] = lambda: None,
) -> KeptAgent | str:
    """Ask the keeper at ``path`` for an agent with these standard streams; the rest as for ``take_over``."""
    from ddplaunch.features.warm import surroundings
    from ddplaunch.features.warm.records import ANSWER_S

    client = keeper_files.connected(path, ANSWER_S)
    if client is None:
        return keeper_files.reason(path) or "it does not answer"
    try:
        folder = os.open(cwd, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        client.close()
        return f"{cwd} cannot be opened"
    environ_fd = surroundings.environ_file(environ)
    try:
        return _answered(client, request, (*streams, folder, environ_fd, *inherited), meanwhile)
    finally:
        os.close(folder)
        os.close(environ_fd)


def _answered(
    client: socket.socket, record: KeeperRequest, fds: Sequence[int], meanwhile: Callable[[], None]
) -> KeptAgent | str:
    from ddplaunch.features.warm.records import CONSENT, KeeperAnswer
    from ddplaunch.protocol import fd_records, wire

    try:
        fd_records.send(client, record, fds)
        meanwhile()
        received = fd_records.receive(client, (KeeperAnswer,), 1)
        if received and received[1]:
            client.sendall(CONSENT)
            return KeptAgent(received[0].pid, received[1][0], client)
    except (OSError, wire.ProtocolError) as error:
        client.close()
        return f"it does not answer: {error}"
    client.close()
    return str(received[0].reason) if received else "it has ended"
