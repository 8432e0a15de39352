"""CommandTransport: starts agents by a command that carries their stdin and stdout, like ``kubectl exec``.

Runs in the launcher; each command is its child process. The command executes ``remote_start.COMMAND`` on the node. The
agent starts, and reports facts about its node, as over SSH.
"""

from __future__ import annotations

import abc
import contextlib
import subprocess
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, BinaryIO, cast

from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.features.remote import remote_start
from ddplaunch.features.remote.start_limit import StartLimit
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import Post, Purpose, Transport, WriteOutput
from ddplaunch.transport.local import PopenHandle

if TYPE_CHECKING:
    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import LaunchConfig

_KEPT_LINES = 20
_END_S = 3.0
"""Seconds for a command to end after SIGTERM; and for its stderr to end when its stdout has."""


class CommandHandle(PopenHandle):
    """One agent on another node.

    Posts NodeFacts, the agent's records and ChannelClosed, or a HostFailure and no other event.
    """

    def __init__(
        self,
        host: str,
        command: tuple[str, ...],
        start: remote_start.RemoteStart,
        post: Post,
        output: WriteOutput,
    ) -> None:
        """Start ``command``, which reads ``remote_start.first_input`` from stdin.

        Raises:
            OSError: there is no such command, or no room for a process.
            RuntimeError: no room for a thread.
        """
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        super().__init__(self._child, f"on {host}", post, output)
        self.host = host
        self._program = command[0]
        self._start = start
        self._output_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._is_connected = False
        self._stderr_reader = self._in_thread("stderr of", self._read_stderr)
        self._writer = self._in_thread("to", self._send)

    def wake(self) -> None:
        """Do nothing: the command does not forward SIGCONT."""

    def kill(self) -> None:
        """End the command by SIGTERM; what then ends the agent, ``CommandTransport.carrier`` says."""
        self._child.terminate()

    def close(self, timeout_s: float = 5.0) -> int | None:
        """Close the agent's stdin and wait for its exit, with ``kill`` after ``timeout_s``; at once if not connected.

        Returns:
            The agent's returncode; None if the command was killed.
        """
        self.end_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s if self._is_connected else 0.0)
        self.kill()
        code = super().close(_END_S)
        # The command reports an exit by signal n as 128 + n, as a shell does.
        return None if code is None or code < 0 else 128 - code if code > 128 else code

    # The writer's thread.

    def _send(self) -> None:
        failure = self._connect()
        if not failure:
            super()._send()
            return
        self.kill()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._post(failure)

    def _connect(self) -> HostFailure | None:
        limit, has_answered, is_late = StartLimit(self._start.timeout_s), threading.Event(), threading.Event()

        def give_up() -> None:
            while (left_s := limit.due - time.monotonic()) > 0:
                if has_answered.wait(left_s):
                    return
            is_late.set()
            self.kill()

        def send(data: bytes) -> None:
            self._write(data)
            limit.restart()

        try:
            self._in_thread("limit of", give_up)
            with contextlib.suppress(OSError):  # The command has exited already; the HostFailure contains its output.
                self._write(remote_start.first_input(self._start))
            facts = remote_start.wait_for_facts(self._stdout, self._output_lines, send)
            if facts.failed:
                self._stderr_reader.join(_END_S)  # It has the reason.
            failure = remote_start.check_facts(self.host, facts, self._start, tuple(self._output_lines))
            if failure is None:
                self._is_connected = True
                self._post_connected(self.host, facts)
                self._in_thread("from", self._receive)
            return failure
        except (EOFError, OSError):
            self._stderr_reader.join(_END_S)
            within_s = self._start.timeout_s if is_late.is_set() else None
            return remote_start.not_started(self.host, self._program, self._output_lines, within_s)
        except RuntimeError as error:
            message = f"the launcher's machine has no room for a thread: {error}"
            return HostFailure(self.host, "start", message, NO_ROOM_HINT)
        finally:
            has_answered.set()

    def _write(self, data: bytes) -> None:
        self._stdin.write(data)
        self._stdin.flush()

    # The thread that reads stderr.

    def _read_stderr(self) -> None:
        with cast("BinaryIO", self._child.stderr) as stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip()
                if self._is_connected:
                    self._post(Notice(f"{self.host}: {line}"))
                else:
                    self._output_lines.append(line)


class CommandTransport(Transport):
    """Starts each agent by a command, its carrier. A node that cannot be used is reported by a HostFailure.

    Attributes:
        missing_hint: for the error that this machine lacks the command: what it is for, and what the user can do.
    """

    missing_hint = ""

    @staticmethod
    @abc.abstractmethod
    def carrier(config: LaunchConfig, host: Host) -> tuple[str, ...]:
        """The command and its options; ddplaunch appends ``/bin/sh -c COMMAND``, to be executed on ``host``.

        The host must get these three words as separate arguments: a command that joins its words for a shell, as ssh
        does, needs a wrapper that quotes them.

        This method only returns the command, since ``--plan`` calls it, too. The command needs no variables of the
        workers: they travel over stdin.

        The command carries stdin, stdout and stderr without a terminal, passes on the end of stdin, and exits with the
        code of what it executes. SIGTERM ends the command, but need not end the agent. (At the end of a run, a command
        that has not ended 3 s after SIGTERM gets SIGKILL.) What ends the agent:

        - At the end of the run, or if the launcher is killed, stdin of the command ends. So does stdin of the agent,
          which stops its workers and exits.
        - If no agent has answered within ``start_timeout_s``, the command gets SIGTERM. What it has started ends at the
          end of stdin; an agent that does not see it ends after 300 s without a record.
        - If the agent is lost, or has not ended in time, the command gets SIGTERM. For a lost one, another command
          starts an agent that kills all processes of the node (a sweep). On a machine that cannot be reached, the lost
          agent stops its workers by itself when no ping has come for ``lost_after_s``.

        ``host.name`` is what the user or a scheduler calls the machine: letters, digits and ``_.-``, or an IPv6
        address. Only the carrier uses it to reach the machine: ddplaunch neither looks it up nor connects to it. The
        nodes meet at an address that the agent of one of them finds on its machine, and must reach each other there.
        Otherwise the name is text: before each line of output, in messages and report.json, as a folder of logs, and to
        choose hosts by ``--include``, ``--exclude``, ``--avoid`` or their faults in earlier runs. ``host`` has a user
        and a port only with ``TransportRow.takes_logins``.
        """

    @classmethod
    def command(cls, config: LaunchConfig, index: int) -> tuple[str, ...]:
        return (*cls.carrier(config, config.hosts[index]), "/bin/sh", "-c", remote_start.COMMAND)

    def _start_agent(self, index: int, post: Post, output: WriteOutput, purpose: Purpose) -> CommandHandle:
        command = self.command(self._config, index)
        start = remote_start.agent_start(self._config, index, self._node_tag(index), purpose)
        try:
            return CommandHandle(self.node_names[index], command, start, post, output)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            message = f"{command[0]} cannot be run here: {error.strerror}"
            raise LaunchError(message, self.missing_hint, NODE_NOT_READY) from None
