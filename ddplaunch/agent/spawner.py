"""The agent's side of the forkserver: start it, ask it for processes, hear from it in the mailbox.

Main thread only; what the forkserver answers, and its end, are posted as events.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import ddplaunch
from ddplaunch import environ, protocol, verdict
from ddplaunch.agent import cgroup, processes
from ddplaunch.agent.events import ForkserverGone
from ddplaunch.agent.program import StartPlan, forkserver_spec, import_error
from ddplaunch.records import (
    FROM_FORKSERVER,
    ForkserverReady,
    ForkserverSpec,
    ImportFailed,
    Notice,
    WorkerSpec,
    WorkerStarted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddplaunch.agent.limits import Limits
    from ddplaunch.model import AgentSpec, Round

_PACKAGE_ROOT = str(Path(ddplaunch.__file__).parent.parent)

# With PYTHONSAFEPATH (Python 3.11) no folder stands before the user's.
_START = (
    "import sys; sys.path[: not getattr(sys.flags, 'safe_path', False)] = [sys.argv[2]]; "
    "from ddplaunch.worker.forkserver import main; main()()"
)

_COMMAND_LINE_ROOM = 4096
"""Bytes a worker's own command line may take in ps; a longer one is shown cut."""


STORE, MEMBER = -1, -2
"""Stand for the store and the rendezvous' member where a worker has its local rank."""


def store_request(round_: Round, listener: socket.socket) -> tuple[WorkerSpec, list[int]]:
    """What to ask for so that the workers' store answers on ``listener``."""
    fds = [os.open(os.devnull, os.O_RDWR), os.dup(2), os.dup(2), os.dup(listener.fileno())]
    return WorkerSpec(tag=f"{round_.attempt}/store", how="store"), fds


class Spawner:
    """Starts the processes of all attempts through a forkserver, and a new one when that has died.

    Attributes:
        plan: how workers are started; by exec once the forkserver has found that it must not fork them.
        is_ready: the forkserver has done its imports.
    """

    def __init__(
        self,
        spec: AgentSpec,
        plan: StartPlan,
        env: Mapping[str, str],
        open_files: Limits,
        post: Callable[[object], None],
    ) -> None:
        self.plan = plan
        self.is_ready = False
        self._spec = spec
        self._env = env
        self._open_files = open_files
        self._post = post
        self._forkserver: Forkserver | None = None
        self._cgroup: Path | None = None
        self._pending: dict[str, int] = {}

    def prepare(self, tell: Callable[[Notice], None]) -> None:
        """Start a forkserver if there is none; ForkserverReady or ImportFailed will be posted."""
        if self._forkserver is None:
            self.is_ready = False
            spec = forkserver_spec(self._spec, self.plan)
            self._forkserver = Forkserver(spec, self._env, self._open_files, self._post)
            self._cgroup, reason = cgroup.create(self._env[environ.RUN_ID])
            if reason:
                tell(Notice(f"the workers on {self._spec.host} get no cgroup of their own: {reason}", 1))

    @property
    def is_waiting(self) -> bool:
        """Something was asked for and not answered yet."""
        return bool(self._pending)

    @property
    def pids(self) -> frozenset[int]:
        """What a sweep between two attempts must spare."""
        return frozenset({self._forkserver.pid} if self._forkserver else ())

    def request(self, spec: WorkerSpec, fds: Sequence[int], place: int) -> None:
        """Ask for a process; ``taken`` will tell ``place``. Closes ``fds``: a pipe's end must not stay open here."""
        if self._forkserver:
            self._pending[spec.tag] = place
            is_worker = place >= 0
            self._forkserver.start(replace(spec, cgroup=str(self._cgroup or "")) if is_worker else spec, fds)
        for fd in fds:
            os.close(fd)

    def taken(self, event: WorkerStarted) -> int | None:
        """The place of what has been started; None if nobody waits for it any more."""
        return self._pending.pop(event.tag, None)

    def heard(self, event: ForkserverReady | ImportFailed | ForkserverGone) -> tuple[str, str]:
        """Take what a forkserver said, or its end: (why no worker can be started, what is worth a notice).

        Raises:
            LaunchError: torch or a module to preload cannot be imported.
        """
        if isinstance(event, ImportFailed):
            raise import_error(self._spec.host, event.module, event.error)
        if isinstance(event, ForkserverGone):
            return self._lost(event.pid)
        self.is_ready = True
        if event.refusal and self.plan.how != "exec":
            self.plan = StartPlan("exec", reason=event.refusal)
        return "", f"workers are started by exec: {self.plan.reason}" if self.plan.reason else ""

    def _lost(self, pid: int) -> tuple[str, str]:
        if self._forkserver is None or self._forkserver.pid != pid:  # Closed by us.
            return "", ""
        was_needed = self.is_waiting or not self.is_ready
        text = f"the forkserver on {self._spec.host} ended by {verdict.describe(self.close())}"
        return (f"the workers could not be started: {text}", "") if was_needed else ("", f"{text}; the workers run on")

    def close(self) -> int:
        """End the forkserver and forget what was asked for; what it started lives on. Returns its returncode."""
        self._pending.clear()
        forkserver, self._forkserver = self._forkserver, None
        return forkserver.close() if forkserver else 0

    def sweep(self, helpers: frozenset[int]) -> tuple[int, ...]:
        """End workers, what they have left, and all other children but the forkserver and ``helpers``.

        Returns the pids that could not be ended.
        """
        if self._cgroup:
            cgroup.kill(self._cgroup)
        return processes.sweep(self.pids | helpers)

    def end(self) -> tuple[int, ...]:
        """End every child of this process, for good. Returns the pids that could not be ended."""
        self.close()
        left = self.sweep(frozenset())
        if self._cgroup:
            cgroup.remove(self._cgroup, time.monotonic() + (0 if left else processes.SWEEP_S))
        return left


class Forkserver:
    """One forkserver process."""

    def __init__(
        self, spec: ForkserverSpec, env: Mapping[str, str], open_files: Limits, post: Callable[[object], None]
    ) -> None:
        """Start it with the user's limit of ``open_files``, which this process may have raised for itself."""
        self._socket, theirs = socket.socketpair()
        padding = " " * _COMMAND_LINE_ROOM
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _START, str(theirs.fileno()), _PACKAGE_ROOT, padding],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=dict(env),
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self.pid = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, open_files)
        # A descriptor of its own, made here: the socket may be closed before the thread runs.
        stream = os.fdopen(os.dup(self._socket.fileno()), "rb")
        threading.Thread(target=self._listen, args=(stream, post), name="forkserver", daemon=True).start()
        self._send(spec, ())

    def start(self, spec: WorkerSpec, fds: Sequence[int]) -> None:
        """Ask for a process; WorkerStarted with its tag will be posted. ``fds`` may be closed after the call."""
        self._send(spec, fds)

    def close(self) -> int:
        """Kill and reap it, and return its returncode; what it started lives on."""
        self._socket.close()
        self._process.kill()
        try:
            return self._process.wait(processes.SWEEP_S)
        except subprocess.TimeoutExpired:  # In uninterruptible sleep; the sweep that follows names it.
            return -signal.SIGKILL

    def _send(self, record: object, fds: Sequence[int]) -> None:
        body = protocol.encode(record)
        # A forkserver that died is told of by ForkserverGone.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [len(body).to_bytes(8, "big")], list(fds))
            self._socket.sendall(body)

    def _listen(self, stream: BinaryIO, post: Callable[[object], None]) -> None:
        with stream, contextlib.suppress(OSError, protocol.ProtocolError):
            while (received := protocol.read_record(stream, FROM_FORKSERVER)) is not None:
                post(received[0])
        post(ForkserverGone(self.pid))
