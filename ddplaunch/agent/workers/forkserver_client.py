"""Client of the forkserver: requests processes, with their descriptors; the answers become events.

Runs in the agent, main thread only; a daemon thread per forkserver posts its answers. Must not follow a worker after
its start (see ``worker_group``).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch.agent.helper_output import HelperOutput
from ddplaunch.agent.workers.exit_details import AttemptFailure
from ddplaunch.agent.workers.start_plan import forkserver_spec, import_error
from ddplaunch.protocol import environment, fd_records, first_failure, wire
from ddplaunch.protocol.agent_entry import IMPORT_PACKAGE, PACKAGE_ROOT
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.protocol.specs import (
    FROM_FORKSERVER,
    ForkserverReady,
    ForkserverSpec,
    ForkserverUnfit,
    ImportFailed,
    ProcessSpec,
    ProcessStarted,
    StartPlan,
)
from ddplaunch.system import cgroup, processes
from ddplaunch.system.processes import ForkedChild
from ddplaunch.text import quote
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.protocol.specs import AgentSpec
    from ddplaunch.system.limits import Limits


FORKSERVER_MODULE = "ddplaunch.worker.forkserver"
"""Started by its name: the agent must not import the worker package. A test checks that the module exists."""

_START = f"""\
{IMPORT_PACKAGE}; from {FORKSERVER_MODULE} import caught, finished, main, script; sys.path[:] = search_path; main()()
with finished, caught:
    script()()"""
"""The last two lines are ``OUTERMOST`` of the worker's bootstrap; a test compares them."""

_COMMAND_LINE_BYTES = 4096
"""Limit of a worker's command line in ps; a longer command line is cut."""

_MAX_REASON = 300

STORE_LOG = "store.log"
"""File in the folder of an attempt: what the process of the workers' store has written."""

_LAST_LINE_S = 1.0

HELPERS = STORE, MEMBER = -1, -2
"""Numbers of the helpers, used where workers have a local rank: the process of the workers' store, and the member."""


Forked = tuple[int, int]
"""Pid and socket of a forkserver that a keeper has forked."""

ForkserverEvent = ForkserverReady | ForkserverUnfit | ImportFailed


class ForkserverClient:
    """Starts the processes of all attempts through a forkserver; starts another forkserver after one has ended.

    Attributes:
        plan: how workers are started; by exec after the forkserver has reported that it must not fork.
        is_ready: the forkserver has finished its imports.
        is_replaced: another forkserver runs in place of the one that a keeper has forked: that did not fit.
        env: the environment of the forkserver.
        open_files: its limits of open files.
        import_s: seconds that its imports have taken; 0 before their end.
    """

    def __init__(
        self,
        spec: AgentSpec,
        plan: StartPlan,
        env: Mapping[str, str],
        open_files: Limits,
        post: Callable[[object], None],
        send: Callable[[object], None],
        fail: Callable[[AttemptFailure], None],
        warm: Forked | None = None,
    ) -> None:
        """``post``, ``send`` to the launcher, and ``fail`` are as in ``NodeServices``.

        ``warm`` is the first forkserver, if a keeper has forked it with this agent.
        """
        self.plan = plan
        self.is_ready = False
        self.import_s = self._started_at = self._ready_at = 0.0
        self._spec = spec
        self.env = env
        self.open_files = open_files
        self._post, self._send, self._fail = post, send, fail
        self._warm = warm
        self.is_replaced = False
        self._process: subprocess.Popen[bytes] | ForkedChild | None = None
        self._socket: socket.socket | None = None
        self._cgroup: Path | None = None
        self._pending: dict[str, int] = {}
        self._store_output: HelperOutput | None = None

    def ensure_forkserver(self) -> None:
        """Start a forkserver, and create a cgroup for its workers, if none runs.

        ForkserverReady or ImportFailed will be posted.
        """
        if self._process is None:
            self._start_forkserver()
            self._cgroup, reason = cgroup.create(self.env[environment.RUN_ID])
            if reason:
                self._send(Notice(f"the workers on {self._spec.host} run without a cgroup: {reason}", 1))

    def _start_forkserver(self) -> None:
        self.is_ready, self._started_at = False, time.monotonic()
        spec = forkserver_spec(self._spec, self.plan)
        warm, self._warm = self._warm, None
        if warm:
            self._process, self._socket = ForkedChild(warm[0]), socket.socket(fileno=warm[1])
            spec = replace(spec, env=dict(self.env))
        else:
            self._process, self._socket = _started(self.env)
        pid = self._process.pid
        with contextlib.suppress(ProcessLookupError):  # The agent may have raised its own limit.
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self.open_files)
        # Duplicated before the thread runs: the socket may be closed by then.
        stream = os.fdopen(os.dup(self._socket.fileno()), "rb")
        in_thread("forkserver", lambda: _read_all(stream, self._take, partial(self._on_exited, pid)))
        self._send_to_forkserver(spec, ())

    def _take(self, record: object) -> None:
        """In a thread: the main thread may be busy, or wait for the file system of the log folder."""
        if isinstance(record, ForkserverReady):
            self._ready_at = time.monotonic()
        self._post(record)

    def _send_to_forkserver(self, record: ForkserverSpec | ProcessSpec, fds: Sequence[int]) -> None:
        # The end of a forkserver is reported by the thread that reads from it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self._socket:
                fd_records.send(self._socket, record, fds)

    @property
    def is_starting(self) -> bool:
        """Whether a requested process has not been reported as started."""
        return bool(self._pending)

    def start(self, spec: ProcessSpec, fds: Sequence[int], local_rank: int) -> None:
        """Request a worker, or a helper by STORE or MEMBER. Closes ``fds``, so that a pipe can end."""
        if self._process:
            self._pending[spec.tag] = local_rank
            is_worker = local_rank not in HELPERS
            self._send_to_forkserver(replace(spec, cgroup=str(self._cgroup or "")) if is_worker else spec, fds)
        for fd in fds:
            os.close(fd)

    def start_store(self, attempt: int, listener: socket.socket, folder: Path | None) -> None:
        """Request the process that serves the workers' store on ``listener``; its output goes into ``folder``."""
        output = HelperOutput(self._store_title, folder and folder / STORE_LOG, self._send)
        self._store_output = output
        fds = [os.open(os.devnull, os.O_RDWR), output.fd, os.dup(output.fd), os.dup(listener.fileno())]
        self.start(ProcessSpec(tag=f"{attempt}/store", how="store"), fds, STORE)

    def store_failure(self, returncode: int) -> AttemptFailure:
        """Why an attempt has failed whose store has ended; with the store's own words if it has exited by itself."""
        said = self._store_output.last_line(_LAST_LINE_S) if self._store_output and returncode > 0 else ""
        text = f"{self._store_title} {first_failure.ended(returncode)}"
        return AttemptFailure(f"{text}: {said}" if said else text, returncode)

    @property
    def _store_title(self) -> str:
        return f"the workers' store on {self._spec.host}"

    def on_started(self, event: ProcessStarted) -> int | None:
        """The local rank or helper that has started; None if its request was dropped by ``close_forkserver``."""
        return self._pending.pop(event.tag, None)

    def handle_event(self, event: ForkserverEvent) -> None:
        """Handle an answer.

        Raises:
            LaunchError: torch or a module of --preload cannot be imported.
        """
        if isinstance(event, ImportFailed):
            raise import_error(self._spec.host, event)
        if isinstance(event, ForkserverUnfit):
            self.is_replaced = True
            self.close_forkserver()
            self._start_forkserver()
            reason = quote(event.reason, _MAX_REASON)
            self._send(Notice(f"{self._spec.host} imports torch anew, in place of what was left: {reason}", 1))
            return
        self.is_ready, self.import_s = True, self._ready_at - self._started_at
        if event.no_fork_reason and self.plan.how != "exec":
            self.plan = StartPlan("exec", reason=event.no_fork_reason)
        if self.plan.reason:
            self._send(Notice(f"workers are started by exec: {self.plan.reason}", 1))

    def _on_exited(self, pid: int) -> None:
        """Forkserver ``pid`` has closed its socket. Running workers are not affected."""
        if self._process is None or self._process.pid != pid:  # ``close_forkserver`` has killed it.
            return
        was_needed = self.is_starting or not self.is_ready
        returncode = self.close_forkserver()
        text = f"the forkserver on {self._spec.host} {first_failure.ended(returncode)}"
        if was_needed:
            self._fail(AttemptFailure(f"the workers could not be started: {text}", returncode))
        else:
            self._send(Notice(f"{text}; the workers continue", 1))

    def close_forkserver(self) -> int:
        """Kill the forkserver and drop all requests; the processes that it forked continue. Returns its returncode."""
        self._pending.clear()
        process, self._process = self._process, None
        if self._socket:
            self._socket.close()
            self._socket = None
        if process is None:
            return 0
        process.kill()
        try:
            return process.wait(processes.UNKILLABLE_AFTER_S)
        except subprocess.TimeoutExpired:  # In uninterruptible sleep; the next sweep reports its pid.
            return -signal.SIGKILL

    def sweep(self, excluded: frozenset[int]) -> tuple[int, ...]:
        """Kill the workers, their descendants and all other children except the forkserver and ``excluded``.

        Returns the pids that SIGKILL has not ended.
        """
        if self._cgroup:
            cgroup.kill(self._cgroup)
        return processes.sweep(excluded | ({self._process.pid} if self._process else set()))

    def close(self) -> tuple[int, ...]:
        """Kill every child of this process. Returns the pids that SIGKILL has not ended."""
        self.close_forkserver()
        unkillable = self.sweep(frozenset())
        if self._cgroup:
            cgroup.remove(self._cgroup, time.monotonic() + (0 if unkillable else processes.UNKILLABLE_AFTER_S))
        return unkillable


def _read_all(stream: BinaryIO, post: Callable[[object], None], at_end: Callable[[], None]) -> None:
    try:
        with stream, contextlib.suppress(OSError, wire.ProtocolError):
            while (received := wire.read_record(stream, FROM_FORKSERVER)) is not None:
                post(received[0])
    finally:
        post(at_end)


def _started(env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        padding = " " * _COMMAND_LINE_BYTES
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", _START, PACKAGE_ROOT, str(theirs.fileno()), padding],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=dict(env),
            pass_fds=(theirs.fileno(),),
        )
    return process, ours
