"""What is above agents, wherever they run: handles on them, who starts these, and what a node is to the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ddplaunch import protocol
from ddplaunch.logs import LogChunk
from ddplaunch.records import Notice, Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.remote import NodeFacts  # noqa: TC004
    from ddplaunch.model import AgentSpec

State = Literal["connecting", "running", "ended", "lost"]


class Handle(Protocol):
    """What is above an agent, wherever it runs. Its records are posted, ``AgentLost`` at the end of its channel."""

    def send(self, record: object) -> None:
        """Queue a record; never blocks."""

    def wake(self) -> None:
        """Continue an agent that somebody has stopped."""

    def kill(self) -> None:
        """SIGKILL the agent; the kernel then kills its workers."""

    def end_input(self) -> None:
        """Close the agent's stdin after what is queued: it stops its workers and ends. For many before ``close``."""

    def close(self, timeout_s: float = 5.0) -> int | None:
        """End the agent's stdin and wait for its end. Returns its returncode; None if nobody knows it."""


class Starter(Protocol):
    """Starts the agents of one kind of nodes.

    Attributes:
        hosts: display names of all nodes there are, the spares last.
        is_remote: an agent has to be connected to first; it posts AgentConnected or a HostFailure.
    """

    hosts: tuple[str, ...]
    is_remote: bool

    def start(self, index: int) -> Handle:
        """Start the agent of node ``index``; its events are posted as ``FromNode``."""

    def spec(self, index: int) -> AgentSpec:
        """What it must know."""

    def sweep(self, index: int) -> Handle | None:
        """Start to end what a lost agent left on its node, told by ``FromSweep``; None if that is not possible."""

    def close(self) -> None:
        """End what is left, after all handles are closed."""


@dataclass(frozen=True)
class AgentConnected:
    """The agent's process runs on its node and takes records; ``facts`` is what it found there."""

    facts: NodeFacts


@dataclass(frozen=True)
class LogData:
    """A piece of a log file of the node's."""

    chunk: LogChunk
    data: bytes


def deliver(
    record: object, data: bytes, post: Callable[[object], None], output: Callable[[Output, bytes], None]
) -> None:
    """What every handle does with an agent's record and the bytes that came with it."""
    if isinstance(record, Output):
        output(record, data)
    else:
        post(LogData(record, data) if isinstance(record, LogChunk) else record)


@dataclass(frozen=True)
class AgentLost:
    """The channel from the agent ended; after AgentEnded that is how it should be."""


@dataclass(frozen=True)
class FromNode:
    """An event of a node's handle."""

    index: int
    event: object


@dataclass(frozen=True)
class FromSweep:
    """An event of the handle that sweeps a lost node."""

    index: int
    event: object


@dataclass
class Node:
    """One node.

    Attributes:
        left: pids there that could not be ended; None while nobody knows.
        sends_logs: all else is done and told.
    """

    index: int
    host: str
    handle: Handle
    state: State = "connecting"
    left: tuple[int, ...] | None = None
    sends_logs: bool = False
    sweep: Handle | None = None
    sweep_deadline: float = 0.0
    facts: NodeFacts | None = None


def complain(error: Exception, who: str, post: Callable[[object], None]) -> None:
    """Tell that what the agent ``who`` says is not understood, if that is the ``error``; an end is told elsewhere."""
    if isinstance(error, protocol.ProtocolError) and not isinstance(error, protocol.CutOff):
        post(Notice(f"what the agent {who} says is not understood, and it is given up: {error}", -1))


def mark_of(mark: str, hosts: tuple[str, ...], index: int) -> str:
    """What all processes of a node carry: nodes may share a machine, and are swept one by one."""
    return mark if len(hosts) == 1 else f"{mark}.{index}"
