"""Agents behind child processes of the launcher: PopenHandle, and LocalTransport for agents on this machine.

Runs in the launcher. One thread of a handle writes the queued records, another reads the agent's. A local run has one
agent; a dry run has one for each simulated node, with a node tag of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, BinaryIO, cast

from ddplaunch import errors
from ddplaunch.errors import LaunchError
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import FROM_OWN_AGENT
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.system import linux
from ddplaunch.threads import in_thread
from ddplaunch.transport import agent_process
from ddplaunch.transport.handle import AgentHandle, ChannelClosed, Post, Purpose, Transport, WriteOutput

if TYPE_CHECKING:
    import threading

    from ddplaunch.config import LaunchConfig
    from ddplaunch.transport.agent_process import AgentProcess, Child


class PopenHandle(AgentHandle):
    """One agent behind a child process.

    A subclass starts the threads that run ``_send``, which is ``_writer``, and ``_receive``, by ``_in_thread``.
    """

    _writer: threading.Thread

    def __init__(
        self,
        process: Child,
        name: str,
        post: Post,
        output: WriteOutput,
        inherited_fds: Mapping[str, int] | None = None,
    ) -> None:
        """Take over ``process``, whose stdin and stdout are pipes."""
        super().__init__(name, post, output, inherited_fds)
        self._process = process
        self._stdin = cast("BinaryIO", process.stdin)
        self._stdout = cast("BinaryIO", process.stdout)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()

    def close(self, timeout_s: float = 5.0) -> int | None:
        """Close the agent's stdin and wait for its exit, with SIGKILL after ``timeout_s``."""
        self.end_input()
        try:
            returncode = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            returncode = self._process.wait()
        self._writer.join(timeout_s)
        return returncode

    def _in_thread(self, direction: str, work: Callable[[], None]) -> threading.Thread:
        """Call ``work`` in a thread.

        Raises:
            RuntimeError: no room for a thread; the process has been killed and reaped.
        """
        try:
            return in_thread(f"{direction} agent {self._name}", work)
        except RuntimeError:
            self._process.kill()
            self._process.wait()
            raise

    def _send(self) -> None:
        with contextlib.suppress(OSError), self._stdin:
            while (record := self._outgoing.get()) is not None:
                self._stdin.write(wire.encode(record))
                self._stdin.flush()

    def _receive(self) -> None:
        with self._stdout:
            if not self._deliver_records(self._stdout):
                self.kill()
        self._post(ChannelClosed())


class LocalHandle(PopenHandle):
    """An agent process on this machine."""

    accepted = FROM_OWN_AGENT

    def __init__(self, agent: AgentProcess, post: Post, output: WriteOutput) -> None:
        """Take over ``agent``.

        Raises:
            RuntimeError: no room for a thread; the agent has been killed.
        """
        super().__init__(agent.process, f"with pid {agent.process.pid}", post, output, agent.inherited_fds)
        self._has_spec = agent.has_spec
        # Pipes to a command keep their size: a slow network follows them, and buffered output would delay answers.
        linux.enlarge_pipe(self._stdout.fileno())
        self._writer = self._in_thread("to", self._send)
        self._in_thread("from", self._receive)

    def send(self, record: object) -> None:
        """As in every handle; an AgentSpec that has been sent already is not sent again."""
        if not (self._has_spec and isinstance(record, AgentSpec)):
            super().send(record)


class LocalTransport(Transport):
    """Starts agents on this machine. The first inherits the user's stdin and, for a single worker, the terminal."""

    is_remote = False

    @staticmethod
    def command(_config: LaunchConfig, _index: int) -> tuple[str, ...]:
        """The agent's process, whichever node it simulates."""
        return agent_process.COMMAND

    def _start_agent(self, index: int, post: Post, output: WriteOutput, purpose: Purpose) -> LocalHandle:
        if purpose != "run":
            return LocalHandle(agent_process.start(os.environ), post, output)
        chdir = self._config.chdir
        if chdir and not os.path.isdir(chdir):
            raise LaunchError(f"--chdir {chdir}: no such folder on {self.node_names[index]}", "", errors.NODE_NOT_READY)
        agent = self._early_agent or agent_process.start_node(
            self._config, self._node_tag(index), is_first=index == 0, stdout_fd=self._stdout_fd
        )
        return LocalHandle(agent, post, output)
