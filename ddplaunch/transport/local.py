"""LocalTransport: starts agents on this machine, one for a local run, or one per simulated node of a dry run.

Runs in the launcher. Every agent is a child process; each simulated node has a different node tag.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch import errors
from ddplaunch.errors import LaunchError
from ddplaunch.protocol.launcher_agent import FROM_OWN_AGENT
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.system import linux
from ddplaunch.transport import agent_process
from ddplaunch.transport.handle import Transport
from ddplaunch.transport.popen_handle import PopenHandle

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.transport.agent_process import AgentProcess
    from ddplaunch.transport.handle import Post, WriteOutput


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
        # Pipes to srun keep their size: a slow network follows them, and buffered output would delay answers.
        linux.enlarge_pipe(self._stdout.fileno())
        self._start_threads(self._writer, self._reader)

    def send(self, record: object) -> None:
        """As in every handle; an AgentSpec that has been sent already is not sent again."""
        if not (self._has_spec and isinstance(record, AgentSpec)):
            super().send(record)


class LocalTransport(Transport):
    """Starts agents on this machine. The first inherits the user's stdin and, for a single worker, the terminal."""

    is_remote = False

    def __init__(
        self,
        config: LaunchConfig,
        hosts: tuple[str, ...],
        run_tag: str,
        output: WriteOutput,
        post: Post,
        early_agent: AgentProcess | None = None,
        stdout_fd: int = 1,
    ) -> None:
        """``early_agent`` is the agent of a single node, if it has been started already; it has its descriptors.

        ``stdout_fd`` gets the workers' stdout.
        """
        super().__init__(config, hosts, run_tag, output, post)
        self._early_agent, self._stdout_fd = early_agent, stdout_fd

    def _start_agent(self, index: int, post: Post, output: WriteOutput, *, for_sweep: bool) -> LocalHandle:
        if for_sweep:
            return LocalHandle(agent_process.start(os.environ), post, output)
        chdir = self._config.chdir
        if chdir and not os.path.isdir(chdir):
            raise LaunchError(f"--chdir {chdir}: no such folder on {self.node_names[index]}", "", errors.NODE_NOT_READY)
        agent = self._early_agent or agent_process.start_node(
            self._config, self._node_tag(index), is_first=index == 0, stdout_fd=self._stdout_fd
        )
        return LocalHandle(agent, post, output)
