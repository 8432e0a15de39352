"""The keeper's process: imports torch, then waits on its socket for the next run, and forks an agent for it.

One thread, one request at a time. Several runs may use it at the same time. Requests come from processes of this user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ddplaunch import features, late_dataclass
from ddplaunch.features.warm import handover, keeper_files, pressure, surroundings
from ddplaunch.features.warm.imports import Imports, user_folders
from ddplaunch.features.warm.records import (
    ANSWER_S,
    MAX_INHERITED,
    MAX_REQUEST_BYTES,
    TAKEOVER_FDS,
    AgentGone,
    KeeperAnswer,
    KeeperRequest,
    KeeperSpec,
)
from ddplaunch.protocol import environment, fd_records, wire
from ddplaunch.protocol.agent_entry import AGENT_MODULE, KEEPER_COMMAND
from ddplaunch.protocol.specs import FROM_FORKSERVER, AgentSpec, ForkserverSpec, ProcessSpec
from ddplaunch.system import linux
from ddplaunch.system.files import run_folder
from ddplaunch.worker import exit, forkserver, late_import, preload
from ddplaunch.worker.bootstrap import caught, finished, script

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.worker.forkserver import Continuation

__all__ = ["caught", "finished", "main", "script"]
"""What the start of this process imports."""

_AGENT_MODULES = (
    AGENT_MODULE,
    "ddplaunch.agent.this_node",
    "ddplaunch.agent.rendezvous.single_node",
    "ddplaunch.agent.rendezvous.multi_node",
    "ddplaunch.rounds.coordinator",
    *features.module_paths("agent"),
)
_RECORDS = (KeeperRequest, AgentSpec, ForkserverSpec, ProcessSpec, *FROM_FORKSERVER)
"""What this process, an agent and a forkserver read before the first line of a worker."""

_CHECK_S = 5.0
"""Seconds between two looks at the memory."""

_TRANSFER_S = 1.0
"""Time limit of a request that is sent, and of an answer that is read."""

_PREDECESSOR_S = 5.0
_SESSION_ENDED = "the session or the scheduler's job that left it has ended"


def main(search_path: list[str]) -> Continuation:
    """Import, then serve until the end. In each forked process, return the function that it must run.

    ``search_path`` is ``sys.path`` in Python's own order.
    """
    own_path = sys.path[:]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Else it is ignored, as in all of a run.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    received, path = wire.read_record(sys.stdin.buffer, (KeeperSpec,)), keeper_files.path(os.environ)
    if received is None or path is None:
        os._exit(0)
    spec: KeeperSpec = received[0]
    parts = surroundings.read(os.environ, os.getcwd())
    imports = Imports(spec.environ)
    imports.hide(spec.environ_fd)
    _detach()
    linux.set_command_line([*KEEPER_COMMAND, "importing"])
    keeper = Keeper(path, spec, imports, parts, own_path, search_path)
    keeper.take_place()
    exit.register()
    keeper.learn(_AGENT_MODULES)
    sys.path[:] = search_path
    keeper.learn((*_modules(spec.script, spec.preload), *features.module_paths("worker")))
    imports.forget_hidden()
    _prepare_forks()
    return keeper.serve()


def _prepare_forks() -> None:
    """What each agent and forkserver would do at its start, 20 ms, and what the first request would wait for."""
    for kind in _RECORDS:
        wire.prepare(kind)
    late_dataclass.make_constructors()


def _detach() -> None:
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 1 << 16)


def _modules(path: str, preloaded: Iterable[str]) -> tuple[str, ...]:
    """What a forkserver would import for this script; of its own words only those of torch."""
    return (*preload.modules_for(forkserver.text_of(path)), *preloaded)


class _Agent(NamedTuple):
    """An agent that this process has forked.

    Attributes:
        client: connection of its launcher.
        script: of its run.
        seconds: for which the next run is waited for after it; None: until the time that was set before.
    """

    pid: int
    client: socket.socket
    script: str
    seconds: float | None


class Keeper:
    """The state of this process.

    Attributes:
        imports: what has been imported.
    """

    def __init__(
        self,
        path: Path,
        spec: KeeperSpec,
        imports: Imports,
        parts: dict[str, str],
        own_path: list[str],
        search_path: list[str],
    ) -> None:
        """``path`` is that of the socket; ``parts`` are the surroundings."""
        self.imports = imports
        self._spec, self._parts, self._own_path, self._search_path = spec, parts, own_path, search_path
        self._path = path
        self._pid = os.getpid()
        self._seconds = spec.seconds
        self._deadline = 0.0
        self._has_place = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._watched: list[int] = []
        self._agents: dict[int, _Agent] = {}
        """The agents of the runs that use this keeper, by their pidfds."""

    # The begin.

    def take_place(self) -> None:
        """Become this user's keeper on this machine, or end: another that fits stays, one that differs ends."""
        try:
            for pid in self._spec.watched:
                self._watched.append(os.pidfd_open(pid))
            run_folder.make_private(self._path.parent)
            keeper_files.check_private(self._path.parent)
            lock = os.open(keeper_files.lock_path(self._path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except ProcessLookupError:
            self.end(_SESSION_ENDED)
        except OSError as error:
            self.end(str(error))
        deadline = time.monotonic() + _PREDECESSOR_S
        while not _locked(lock):
            if self._predecessor_fits() or time.monotonic() > deadline:
                os._exit(0)
            time.sleep(0.1)
        self._has_place = True
        keeper_files.write_reason(self._path, "it is still importing")

    def _predecessor_fits(self) -> bool:
        """Whether another keeper stays. If not, it ends, imports, or a run uses it: perhaps the one that left this."""
        client = keeper_files.connected(self._path, ANSWER_S)
        if client is None:
            return False
        inquiry = KeeperRequest(
            surroundings=self._parts,
            env=self.imports.environ,
            preload=self._spec.preload,
            seconds=self._spec.seconds,
            script=self._spec.script,
        )
        with client, contextlib.suppress(OSError, wire.ProtocolError):
            fd_records.send(client, inquiry)
            received = fd_records.receive(client, (KeeperAnswer,), 0)
            return bool(received and received[0] == KeeperAnswer("fits"))
        return False

    def learn(self, modules: tuple[str, ...]) -> None:
        """Import ``modules``. Ends this process if it cannot be a keeper with them."""
        required = (*_AGENT_MODULES, *preload.ALWAYS, *self._spec.preload)
        reason = self.imports.run(("numpy",), ())
        threads = forkserver.threads_after_numpy()
        reason = reason or self.imports.run(modules, required) or self.imports.note()
        reason = reason or forkserver.reason_not_to_fork(threads)
        if reason:
            self.end(reason)
        late_import.choose_modules()

    def end(self, reason: str) -> NoReturn:
        """End this process. ``reason`` is shown with the next run's ``-v``."""
        if os.getpid() == self._pid:
            if self._has_place:  # Else it is the socket of another keeper.
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
            keeper_files.write_reason(self._path, reason)
        os._exit(0)

    # The loop.

    def serve(self) -> Continuation:
        """Wait for runs until the end. In a forked process, return the function that it must run."""
        signal.signal(signal.SIGTERM, lambda *_: self.end("it was ended by --kill warm or another process"))
        try:
            self._listen()
        except OSError as error:
            self.end(f"{self._path}: {error}")
        keeper_files.write_reason(self._path, "")
        self._wait_for(self._seconds)
        while True:
            ready = self._wait()
            for pidfd in ready.intersection(self._agents):
                self._on_agent_gone(pidfd)
            if self._listener.fileno() in ready:
                continuation = self._on_request()
                if continuation:
                    return continuation

    def _listen(self) -> None:
        self._path.unlink(missing_ok=True)
        with keeper_files.short_path(self._path) as address:
            self._listener.bind(address)
        os.chmod(self._path, 0o600)  # Nobody can connect before ``listen``.
        self._listener.listen(8)

    def _wait_for(self, seconds: float | None) -> None:
        """Wait for so many seconds from now; None: until the time that was set before."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if seconds is not None:
            self._seconds, self._deadline = seconds, now + seconds
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._deadline - now))
        self._show(f"waits until {until}")

    def _show(self, text: str) -> None:
        """Show in ps what this process does: ``text``, unless runs use it."""
        pids = ", ".join(str(agent.pid) for agent in self._agents.values())
        linux.set_command_line([*KEEPER_COMMAND, f"used by process {pids}" if pids else text])

    def _wait(self) -> set[int]:
        """The descriptors that are ready; ends the process when its time has come."""
        poll = select.poll()
        for fd in (self._listener.fileno(), *self._watched, *self._agents):
            poll.register(fd, select.POLLIN)
        remaining = self._deadline - time.clock_gettime(time.CLOCK_BOOTTIME)
        if remaining <= 0 and not self._agents:
            self.end(f"no run used it for {self._seconds:g} s")
        ready = {fd for fd, _ in poll.poll(min(_CHECK_S, _CHECK_S if self._agents else remaining) * 1000)}
        if ready.intersection(self._watched):
            self.end(_SESSION_ENDED)
        if not ready and (reason := pressure.reason()):
            self.end(reason)
        return ready

    def _on_agent_gone(self, pidfd: int) -> None:
        agent = self._agents.pop(pidfd)
        returncode = os.waitstatus_to_exitcode(os.waitpid(agent.pid, 0)[1])
        os.close(pidfd)
        with agent.client, contextlib.suppress(OSError):
            fd_records.send(agent.client, AgentGone(returncode))
        self._wait_for(agent.seconds)
        self.learn(_modules(agent.script, ()))

    def _on_request(self) -> Continuation | None:
        client, _ = self._listener.accept()
        client.settimeout(_TRANSFER_S)
        try:
            if linux.peer_credentials(client)[1] == os.geteuid():
                max_fds, deadline = TAKEOVER_FDS + MAX_INHERITED, time.monotonic() + _TRANSFER_S
                received = fd_records.receive(client, (KeeperRequest,), max_fds, MAX_REQUEST_BYTES, deadline)
                if received:
                    return self._answer(client, *received)
        except (OSError, wire.ProtocolError):
            pass
        client.close()
        return None

    def _answer(self, client: socket.socket, request: KeeperRequest, fds: list[int]) -> Continuation | None:
        answer = self._compared(request, fds)
        if request.argv and answer.state == "fits":
            return self._hand_over(client, request, fds)
        fd_records.close(fds)
        with client:
            fd_records.send(client, answer)
        if not request.argv:
            if answer.state == "differs":
                self.end("another took its place")
            if answer.state == "fits":
                self._wait_for(request.seconds)
                self.learn(_modules(request.script, ()))
        return None

    def _compared(self, request: KeeperRequest, fds: list[int]) -> KeeperAnswer:
        if request.argv and len(fds) < TAKEOVER_FDS:
            return KeeperAnswer("differs", "descriptors are missing")
        reason = self._difference(request)
        if reason and self._agents and not request.argv:
            return KeeperAnswer("used", reason)
        return KeeperAnswer("differs", reason) if reason else KeeperAnswer("fits")

    def _difference(self, request: KeeperRequest) -> str:
        if name := surroundings.first_difference(self._parts, request.surroundings):
            return f"{name}: not as when it was left"
        if request.preload != self._spec.preload:
            return "other modules in --preload"
        # Before a run only the agent knows what it will set: the forkserver compares that.
        if name := self.imports.difference(request.env, environment.SET_BEFORE_IMPORTS if request.argv else ()):
            return f"the environment variable {name} has changed"
        # For a run the forkserver looks, while the launcher loads its modules.
        if not request.argv and self.imports.changed_file():
            return "an imported file has changed"
        if path := self.imports.hidden_by(user_folders()):
            return f"{path} would hide a module" if path.isprintable() else "a file would hide a module"
        return ""

    def _hand_over(self, client: socket.socket, request: KeeperRequest, fds: list[int]) -> Continuation | None:
        reader, writer = os.pipe()
        try:
            pid = forkserver.quiet_fork()
        except OSError as error:
            with client:
                fd_records.send(client, KeeperAnswer("differs", f"it cannot fork: {error}"))
            pid = -1
        if pid == 0:
            for each in (self._listener, *(agent.client for agent in self._agents.values())):
                each.detach()  # None is closed: their numbers may soon be files of the agent.
            return handover.become_agent(request, fds, client.detach(), writer, self.imports, self._own_path)
        fd_records.close([*fds, writer])
        if pid > 0:
            self._confirm(_Agent(pid, client, request.script, request.seconds), reader)
        os.close(reader)
        return None

    def _confirm(self, agent: _Agent, reader: int) -> None:
        """Answer once the fork can be found by its run tag, or has ended."""
        pidfd = os.pidfd_open(agent.pid)
        self._agents[pidfd] = agent
        if not select.select([reader], [], [], _TRANSFER_S)[0]:  # The launcher waits no longer.
            os.kill(agent.pid, signal.SIGKILL)
        problem = os.read(reader, 300).decode(errors="replace")
        self._show("")
        with contextlib.suppress(OSError):
            if problem == handover.READY:
                fd_records.send(agent.client, KeeperAnswer("fits", pid=agent.pid), (pidfd,))
            else:
                text = problem if problem and problem.isprintable() else "its agent ended"
                fd_records.send(agent.client, KeeperAnswer("differs", text))


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
