"""LocalTransport: starts agents on this machine, one for a local run, or one per simulated node of a dry run.

Runs in the launcher. Every agent is a child process; each simulated node has a different node tag.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch import errors
from ddplaunch.errors import LaunchError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import environment
from ddplaunch.protocol.launcher_agent import FROM_OWN_AGENT
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.system import linux, procfs
from ddplaunch.transport import agent_process
from ddplaunch.transport.handle import Transport, node_tag
from ddplaunch.transport.popen_handle import PopenHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.features.faults.fault_spec import FaultSpec
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.transport.agent_process import AgentProcess
    from ddplaunch.transport.handle import Post, WriteOutput
    from ddplaunch.transport.remote_start import Purpose


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
        self._start_threads(self._writer, self._reader)

    def send(self, record: object) -> None:
        """As in every handle; an AgentSpec that has been sent already is not sent again."""
        if not (self._has_spec and isinstance(record, AgentSpec)):
            super().send(record)


class LocalTransport(Transport):
    """Starts agents on this machine. The first inherits the user's stdin and, for a single worker, the terminal."""

    is_remote = False

    def _start_agent(self, index: int, post: Post, output: WriteOutput, purpose: Purpose) -> LocalHandle:
        if purpose != "run":
            return LocalHandle(agent_process.start(os.environ), post, output)
        chdir = self._config.chdir
        if chdir and not os.path.isdir(chdir):
            raise LaunchError(f"--chdir {chdir}: no such folder on {self.node_names[index]}", "", errors.NODE_NOT_READY)
        output = with_line_search(self._config.injections, output, post)
        agent = self._early_agent or agent_process.start_node(
            self._config, self._node_tag(index), is_first=index == 0, stdout_fd=self._stdout_fd
        )
        return LocalHandle(agent, post, output)


def signal_node(run_tag: str, hosts: tuple[str, ...], index: int, signum: int) -> int:
    """Send a signal to every process of a simulated node, its agent included. Returns the number of processes."""
    return len(procfs.signal_all(f"{environment.RUN_ID}={node_tag(run_tag, hosts, index)}", signum))


_KEPT_BYTES = 1 << 16
"""Bytes kept of an unfinished line: the searched text may arrive in two chunks."""


@dataclass(frozen=True)
class LineSeen:
    """A worker has printed the line of injection ``number``, in the attempt of that injection."""

    number: int


def with_line_search(injections: Sequence[FaultSpec], output: WriteOutput, post: Post) -> WriteOutput:
    """``output`` of one node, preceded by a search for the lines of ``injections``, each posted once as LineSeen."""
    searched = [
        (number, injection, os.fsencode(injection.after_line))
        for number, injection in enumerate(injections)
        if injection.after_line
    ]
    posted: set[int] = set()
    unfinished: dict[tuple[int, int, str], bytes] = {}

    def search(header: Output, data: bytes) -> None:
        key = (header.attempt, header.rank, header.stream)
        text = unfinished.pop(key, b"") + data
        if rest := text[text.rfind(b"\n") + 1 :]:
            unfinished[key] = rest[-_KEPT_BYTES:]
        for number, injection, needle in searched:
            matches = injection.attempt == header.attempt and injection.rank in (None, header.rank)
            if matches and needle in text and number not in posted:
                posted.add(number)
                post(LineSeen(number))
        output(header, data)

    return search if searched else output
