"""Interfaces between the launcher and its agents: Transport, AgentHandle, and the events that they post.

Part of the launcher's process. A handle posts its agent's records from its reading thread; the main thread calls all
methods. Nothing here interprets a record.
"""

from __future__ import annotations

import abc
import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO, Literal

from ddplaunch import features
from ddplaunch.errors import LaunchError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import FROM_AGENT, Notice, Output, SweepNode, with_senders_host
from ddplaunch.protocol.output_runs import check_runs
from ddplaunch.system.limits import NO_ROOM_HINT

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.transport.agent_process import AgentProcess


Post = Callable[[object], None]
"""Appends an event to the launcher's mailbox; any thread."""

WriteOutput = Callable[[Output, bytes], None]
"""Shows a chunk of a worker's output; any thread."""

Purpose = Literal["run", "sweep", "query"]
"""What an agent is started for: to run workers, to kill the processes of a lost node, or to say what is on a host."""


_LARGE_BYTES = 4096
_decodes_large = threading.Lock()
"""Held while a large record is decoded. All nodes may send one at once, and each has a thread here: if hundreds of them
computed, every other thread, such as that of the pings, would wait for seconds."""


class AgentHandle(abc.ABC):
    """One agent and its channel. The main thread calls the methods; the agent's events are posted by other threads.

    The agent's records are posted as they arrive, ``ChannelClosed`` when the channel has closed.

    Attributes:
        inherited_fds: descriptors that the agent has inherited from the launcher, by stream name; empty on other
            machines.
        heard_at: ``time.monotonic()`` at which the last record of the agent was read; infinite while one waits here to
            be decoded. It counts as an answer to a ping: behind output, a slow link carries the answer later.
        accepted: the records that the agent may send; others are invalid.
    """

    accepted: tuple[type, ...] = FROM_AGENT

    def __init__(
        self, name: str, post: Post, output: WriteOutput, inherited_fds: Mapping[str, int] | None = None
    ) -> None:
        """``name`` names the agent in messages: ``on HOST``."""
        self.inherited_fds: Mapping[str, int] = inherited_fds or {}
        self._name = name
        self._post = post
        self._output = output
        self.heard_at = 0.0
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        """Records to send; None ends the agent's input."""

    def send(self, record: object) -> None:
        """Queue a record; never blocks. A closed channel is reported by ``ChannelClosed``."""
        self._outgoing.put(record)

    def end_input(self) -> None:
        """Close the agent's stdin behind the queued records: it stops its workers and exits. Does not wait."""
        self._outgoing.put(None)

    @abc.abstractmethod
    def wake(self) -> None:
        """Continue an agent that was stopped by a signal (SIGCONT)."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End the agent at once; the kernel then kills its workers."""

    @abc.abstractmethod
    def close(self, timeout_s: float = 5.0) -> int | None:
        """Close the agent's stdin and wait up to ``timeout_s`` for its exit.

        Returns:
            Its returncode; None if that is unknown.
        """

    def _post_connected(self, host: object, facts: NodeFacts) -> None:
        """Post that the agent has been started on another machine, ``host``, and what has come of a keeper there."""
        self._post(facts)
        if facts.kept:
            self._post(Notice(f"{host}: {facts.kept}", 1))
        if facts.sent:
            self._post(Notice(f"{host}: runs the ddplaunch that was sent to it", 1))

    def _deliver_records(self, stream: BinaryIO) -> bool:
        """Read the agent's records from ``stream`` until it closes: output is shown, the other records are posted.

        Returns:
            Whether the stream was closed between two records; if not, the agent cannot be used any more. Invalid
            input and an unexpected error are reported in a Notice; an incomplete last record is not, since its writer
            was killed.
        """
        try:
            while (received := wire.read_record(stream, self.accepted, late_types, self._decoding)) is not None:
                self._deliver(*received)
        except (wire.CutOff, OSError, EOFError):
            return False
        except Exception as error:
            self._report(error)
            return False
        return True

    def _report(self, error: Exception) -> None:
        """Post why the agent is given up: an invalid record, a bug, or a file that an upgrade has removed meanwhile."""
        is_invalid = isinstance(error, wire.ProtocolError)
        why = f"sent an invalid record and was given up: {error}" if is_invalid else ""
        told = why or f"was given up: {type(error).__name__}: {error}"
        self._post(Notice(f"the agent {self._name} {told}", -1))

    @contextlib.contextmanager
    def _decoding(self, nbytes: int) -> Iterator[None]:
        if nbytes <= _LARGE_BYTES:
            yield
            return
        self.heard_at = math.inf
        try:
            with _decodes_large:
                yield
        finally:
            self.heard_at = time.monotonic()

    def _deliver(self, record: object, data: bytes) -> None:
        """Raises ProtocolError for output that cannot be shown: nobody else waits for an error of this thread."""
        self.heard_at = time.monotonic()
        if isinstance(record, Output):
            try:
                check_runs(record, data)
                self._output(record, data)
            except Exception as error:
                raise wire.ProtocolError(f"its Output cannot be shown: {type(error).__name__}: {error}") from error
        else:
            self._post(WithData(record, data) if isinstance(record, wire.Chunk) else record)


class NoAgent(AgentHandle):
    """In place of the agent of a node that is never started."""

    def __init__(self) -> None:
        super().__init__("that was never started", lambda _: None, discard_output)

    def send(self, record: object) -> None: ...

    def end_input(self) -> None: ...

    def wake(self) -> None: ...

    def kill(self) -> None: ...

    def close(self, timeout_s: float = 5.0) -> int | None:
        return None


class Transport(abc.ABC):
    """Starts agents on one kind of nodes: those of a run, or those that answer queries. Main thread only.

    Attributes:
        node_names: display names of all nodes, the spares last.
        is_remote: each agent has to be connected to first: its handle posts NodeFacts or a HostFailure.
    """

    is_remote = True

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
        """``run_tag`` must be unique to this run: a sweep kills all processes that carry it.

        On this machine, ``early_agent`` is the agent of a single node, if it has been started already, and a single
        worker inherits ``stdout_fd`` if that is a terminal.
        """
        self.node_names = hosts
        self._config = config
        self._run_tag = run_tag
        self._output = output
        self._post = post
        self._early_agent, self._stdout_fd = early_agent, stdout_fd

    def start(self, index: int, purpose: Purpose = "run") -> AgentHandle:
        """Start the agent of node ``index``; its events are posted as ``FromNode``. ``start_together`` must follow.

        Raises:
            LaunchError: this machine cannot start it.
        """
        host, post, output = self.node_names[index], self._post, self._output
        try:
            return self._start_agent(
                index,
                lambda event: post(FromNode(index, with_senders_host(host, event))),
                lambda header, data: output(with_senders_host(host, header), data),
                purpose,
            )
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"the agent on {host} cannot be started: {error}", NO_ROOM_HINT) from None

    def sweep(self, index: int, on_event: Callable[[object], object]) -> AgentHandle | None:
        """Start an agent that kills all processes of the lost node ``index``; calls of ``on_event`` are posted.

        Returns:
            None if this machine cannot start it.
        """
        try:
            post = self._post
            sweeper = self._start_agent(index, lambda event: post(lambda: on_event(event)), discard_output, "sweep")
        except (OSError, RuntimeError, LaunchError):
            return None
        excluded_pids = () if self.is_remote else (os.getpid(), os.getppid())
        sweeper.send(SweepNode(self._node_tag(index), excluded_pids))
        self.start_together()
        return sweeper

    def start_together(self) -> None:  # noqa: B027
        """Start the agents that have waited for this, because one command starts many of them."""

    def close(self) -> None:  # noqa: B027
        """Release the resources that the handles share, after all handles are closed."""

    @staticmethod
    @abc.abstractmethod
    def command(config: LaunchConfig, index: int) -> tuple[str, ...]:
        """What is executed to start an agent of node ``index``: one text for its shell, or a command here.

        ``--plan`` shows it, so it contacts nobody.
        """

    @abc.abstractmethod
    def _start_agent(self, index: int, post: Post, output: WriteOutput, purpose: Purpose) -> AgentHandle:
        """Start an agent on node ``index``. It runs workers only for the ``purpose`` "run".

        Raises:
            LaunchError: this machine cannot start it, for a reason that the user can change.
            OSError, RuntimeError: this machine has no room for a process or a thread.
        """

    def _node_tag(self, index: int) -> str:
        return node_tag(self._run_tag, self.node_names, index)


@dataclass(frozen=True)
class NodeFacts:
    """Posted when the agent runs on its node and accepts records: what the node has said of itself before.

    A version is empty if the package is missing.

    Attributes:
        pid: of the agent, as itself sees it: in a container, another process may have this pid outside. 0 if the
            answer holds no pid that may be signalled.
        error: why ddplaunch cannot be loaded, or the launcher not be reached.
        directory: why the working directory cannot be entered; empty if it can.
        kept: what has come of a keeper, for ``-v``; empty if there was none to expect.
        failed: the step that failed before the agent could start: ``python`` or ``setup``, with ``status`` as its exit
            code, or ``call``, the connection to the launcher, with the addresses and the reasons in ``error``.
        has_connected: the agent is connected to the launcher, which reads the facts there.
        not_connected: why it is not, although it was to be.
        sent: it runs a ddplaunch that a launcher has sent to it.
    """

    pid: int = 0
    python: str = ""
    ddplaunch: str = ""
    torch: str = ""
    error: str = ""
    directory: str = ""
    has_script: bool = True
    kept: str = ""
    failed: str = ""
    status: int = 0
    has_connected: bool = False
    not_connected: str = ""
    sent: bool = False


@dataclass(frozen=True)
class WithData:
    """A record of the agent and the bytes that have followed it."""

    chunk: wire.Chunk
    data: bytes


@dataclass(frozen=True)
class ChannelClosed:
    """The channel from the agent has closed; expected after AgentEnded, otherwise the agent is lost."""


@dataclass(frozen=True)
class FromNode:
    """An event of the handle of node ``index``."""

    index: int
    event: object


def discard_output(_header: Output, _data: bytes) -> None:
    """The WriteOutput of an agent that has no workers."""


def node_tag(run_tag: str, hosts: tuple[str, ...], index: int) -> str:
    """The tag in the environment of all processes of node ``index``: nodes on one machine have different ones."""
    return run_tag if len(hosts) == 1 else f"{run_tag}.{index}"


def late_types() -> tuple[type, ...]:
    """What features send, and agents without workers, besides ``accepted``: a short run does not load it."""
    return *features.records("FROM_AGENT"), *features.records("FROM_AGENT", "queries")
