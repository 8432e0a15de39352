"""Queries agents that run no job, such as those of ``--ps``, ``--kill`` and ``--check``.

Runs in the process that the user started; events are handled in its main thread. An agent that sends no answer by its
deadline has failed. The commands define the queries and use the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher import setup
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import AgentEnded, AgentFailed
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import AgentHandle, ChannelClosed, FromNode, NodeFacts, discard_output

if TYPE_CHECKING:
    from ddplaunch.cluster.hosts import Host
    from ddplaunch.transport.handle import Post, Purpose, Transport

ANSWER_TIMEOUT_S = 30.0
"""Seconds for one answer; a slow DNS look-up, or all attempts to connect to a node, take less."""


def query_transport(hosts: Sequence[Host], remote: RemoteConfig, post: Post) -> Transport:
    """The Transport whose agents say what is on ``hosts``; without hosts, on this machine.

    Raises:
        LaunchError: as ``setup.transport_for``.
    """
    config = LaunchConfig(script="-", hosts=tuple(hosts), remote=remote)
    return setup.transport_for(config, "", discard_output, post)


@dataclass
class QueriedNode:
    """A node whose agent is queried.

    Attributes:
        deadline: time limit of the next answer, by ``time.monotonic()``; infinite until the agent is connected, because
            the handle limits that time.
        failure: why the agent has sent no answer.
        answers: what the agent has answered, by the class of the record.
        received_s: when each answer came, by ``time.time()``.
    """

    name: str
    handle: AgentHandle
    deadline: float
    failure: HostFailure | None = None
    answers: dict[type, Any] = field(default_factory=dict)
    received_s: dict[type, float] = field(default_factory=dict)


class Queries:
    """The queried nodes, and the events of their agents."""

    def __init__(self, answer_s: float = ANSWER_TIMEOUT_S) -> None:
        """``answer_s``: time limit of the first answer of each agent, in seconds from when it is connected."""
        self._answer_s = answer_s
        self.nodes: list[QueriedNode] = []
        self._mailbox: Mailbox[tuple[int, float, object]] = Mailbox()

    def start(self, transport: Transport, query: object, purpose: Purpose = "query") -> None:
        """Start the agents of all nodes of ``transport``, and send each its first query.

        Raises:
            LaunchError: this machine cannot start one.
        """
        for index, name in enumerate(transport.node_names):
            handle = transport.start(index, purpose)
            handle.send(query)
            deadline = float("inf") if transport.is_remote else time.monotonic() + self._answer_s
            self.nodes.append(QueriedNode(name, handle, deadline))
        transport.start_together()

    def ask(
        self,
        nodes: Iterable[QueriedNode],
        query: Callable[[QueriedNode], object],
        answer: type,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        """Send each node that has not failed a query, and wait for the answers, which are of type ``answer``."""
        asked = [node for node in nodes if not node.failure]
        for node in asked:
            node.handle.send(query(node))
            node.deadline = time.monotonic() + timeout_s
        self.wait(asked, answer)

    def post(self, event: object, first: int = 0) -> None:
        """Post what a transport posts, whose nodes begin at ``nodes[first]``. Any thread."""
        if isinstance(event, FromNode):
            self._mailbox.post((first + event.index, time.time(), event.event))

    def wait(self, nodes: Sequence[QueriedNode], answer: type) -> None:
        """Handle events until each node has sent an answer of this type, or has failed. Main thread only."""
        while pending := [node for node in nodes if not (node.failure or answer in node.answers)]:
            if self.next_event(min(node.deadline for node in pending)):
                continue
            for node in pending:
                if time.monotonic() >= node.deadline:
                    node.failure = HostFailure(node.name, "timeout", "no answer in time")

    def next_event(self, deadline: float) -> QueriedNode | None:
        """Handle the next event, and return its node; None at ``deadline`` (``time.monotonic()``). Main thread only."""
        received = self._mailbox.get(deadline)
        if not received:
            return None
        index, received_s, event = received
        self._on_event(self.nodes[index], event, received_s)
        return self.nodes[index]

    def failures(self) -> list[HostFailure]:
        """The failures of all nodes."""
        return [node.failure for node in self.nodes if node.failure]

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the handles of all agents, and wait up to ``timeout_s`` for their exit: not for each of them so long.

        An agent that has failed is not waited for.
        """
        for node in self.nodes:
            node.handle.end_input()
        deadline = time.monotonic() + timeout_s
        for node in self.nodes:
            node.handle.close(0.0 if node.failure else max(0.0, deadline - time.monotonic()))

    def _on_event(self, node: QueriedNode, event: object, received_s: float) -> None:
        match event:
            case NodeFacts():
                node.deadline = time.monotonic() + self._answer_s
                node.answers[NodeFacts] = event
            case HostFailure():
                node.failure = event
            case AgentFailed(message=message, hint=hint):
                node.failure = HostFailure(node.name, "start", message, hint)
            case ChannelClosed():
                if AgentEnded not in node.answers:
                    node.failure = node.failure or HostFailure(node.name, "start", "the connection was closed")
            case _:
                node.answers[type(event)], node.received_s[type(event)] = event, received_s
