"""Queries agents that run no job, such as those of ``--ps``, ``--kill`` and ``--check``.

Runs in the process that the user started; events are handled in its main thread. An agent that sends no answer by its
deadline has failed. The commands define the queries and use the answers.
"""

from __future__ import annotations

import time
from dataclasses import field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddplaunch.late_dataclass import dataclass
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import AgentFailed
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import AgentConnected, AgentHandle, ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWER_TIMEOUT_S = 30.0
"""Seconds for one answer; a slow DNS look-up, or all attempts to connect to a node, take less."""


@dataclass
class QueriedNode:
    """A node whose agent is queried.

    Attributes:
        answers: what the agent has answered, by the class of the record.
        failure: why the agent has sent no answer.
        deadline: time limit of the next answer, by ``time.monotonic()``; infinite until the agent is connected, because
            the handle limits that time.
    """

    name: str
    handle: AgentHandle
    failure: HostFailure | None = None
    deadline: float = float("inf")
    answers: dict[type, Any] = field(default_factory=dict)

    def handle_event(self, event: object, received_s: float) -> None:
        """Handle an event of the agent; ``received_s`` is its ``time.time()``."""
        match event:
            case AgentConnected():
                self.deadline = time.monotonic() + ANSWER_TIMEOUT_S
            case HostFailure():
                self.failure = event
            case AgentFailed(message=message, hint=hint):
                self.failure = HostFailure(self.name, "start", message, hint)
            case ChannelClosed():
                self.failure = self.failure or HostFailure(self.name, "start", "the connection was closed")
            case _:
                self.answers[type(event)] = event


def first_deadline(*, is_remote: bool) -> float:
    """``QueriedNode.deadline`` of an agent that has just been started."""
    return float("inf") if is_remote else time.monotonic() + ANSWER_TIMEOUT_S


Node = TypeVar("Node", bound=QueriedNode)


class Queries(Generic[Node]):
    """The queried nodes, and the events of their agents."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._mailbox: Mailbox[tuple[int, float, object]] = Mailbox()

    def post(self, index: int, event: object) -> None:
        """Post an event of the agent of ``nodes[index]``. Any thread."""
        self._mailbox.post((index, time.time(), event))

    def wait(self, nodes: Sequence[Node], is_done: Callable[[Node], bool]) -> None:
        """Handle events until each of ``nodes`` is done or has failed. Main thread only."""
        while pending := [node for node in nodes if not (node.failure or is_done(node))]:
            received = self._mailbox.get(min(node.deadline for node in pending))
            if received:
                index, received_s, event = received
                self.nodes[index].handle_event(event, received_s)
                continue
            for node in pending:
                if time.monotonic() >= node.deadline:
                    node.failure = HostFailure(node.name, "timeout", "no answer in time")

    def failures(self) -> list[HostFailure]:
        """The failures of all nodes."""
        return [node.failure for node in self.nodes if node.failure]

    def close(self) -> None:
        """Close the handles of all agents and wait for their exit."""
        for node in self.nodes:
            node.handle.end_input()
        for node in self.nodes:
            node.handle.close()
