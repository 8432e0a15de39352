"""A node's rendezvous with the loop of its agent, where a script of the test stands for the member's process."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ddplaunch.agent.parts import NodeServices
from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.protocol.rendezvous import (
    FROM_NODE,
    FROM_SERVING_AGENT,
    MemberReady,
    MemberSpec,
    NodeLeft,
    RendezvousLost,
)
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.threads import in_thread
from tests.support.configs import rendezvous_config

READY = MemberReady(3, "127.0.0.1", 29400, "theirs", "key")
GIVE_UP = Notice("the test: the time of this wait is over")
_BOUND_S = 20.0

Answers = Mapping[type, Sequence[object]]
"""What the member says to a record of a type; a function is called instead."""


class Node(NodeServices):
    """The agent of one node.

    Attributes:
        told: what the member has got of the agent.
        sent: what the launcher has got.
        limit_s: after GIVE_UP, how long that wait would have gone on.
    """

    def __init__(self, spec: AgentSpec, answers: Answers, **config: Any) -> None:
        """``config``: the fields of the RendezvousConfig, unless the launcher assigns that."""
        if not spec.one_launcher_leads:
            given = {"server_addresses": ("127.0.0.1",), "is_server": False, **config}
            spec = replace(spec, rendezvous=rendezvous_config(**given))
        self.answers, self.must_stop = dict(answers), False
        self.told: list[Any] = []
        self.sent: list[object] = []
        self.limit_s = 0.0
        self._gave_up = False
        self._mailbox: Mailbox[object] = Mailbox()
        self.post = self._mailbox.post
        self.spec = spec
        outbox: Any = SimpleNamespace(send=self._send)
        self.outbox = outbox
        self.rendezvous: MultiNodeRendezvous = MultiNodeRendezvous(self, 1)

    def is_stopping(self) -> bool:
        """Whether the test has set ``must_stop``."""
        return self.must_stop

    def saved(self) -> str | None:
        """No feature knows it."""
        return None

    def stops_by(self) -> float:
        """The agent has no order with a longer time."""
        return 0.0

    def wait(self, done: Callable[[], bool], deadline: float | Callable[[], float] = float("inf")) -> bool:
        """As in the agent, until the member says GIVE_UP."""
        bound = time.monotonic() + _BOUND_S
        while not done():
            if self._gave_up:
                self._gave_up = False
                self.limit_s = (deadline() if callable(deadline) else deadline) - time.monotonic()
                return False
            event = self._mailbox.get(bound)
            assert event is not None, "the member says nothing"
            event() if callable(event) else self.rendezvous.handle_event(event)
        return True

    def _send(self, record: object) -> None:
        if record == GIVE_UP:
            self._gave_up = True
        else:
            self.sent.append(record)

    def close(self) -> None:
        """The agent ends; its member hears that at once."""
        self.answers[NodeLeft] = [RendezvousLost("the test is over")]
        self.rendezvous.close()

    def start_member(self, fds: list[int]) -> None:
        """As in the agent: the member has these descriptors from now on."""
        *others, channel, endpoint = fds
        for fd in (*others, endpoint):
            os.close(fd)
        in_thread("member", lambda: self._answer_all(socket.socket(fileno=channel)))

    def _answer_all(self, channel: socket.socket) -> None:
        with channel, channel.makefile("rb") as stream:
            while (received := wire.read_record(stream, (MemberSpec, *FROM_NODE, *FROM_SERVING_AGENT))) is not None:
                self.told.append(received[0])
                for answer in self.answers.get(type(received[0]), ()):
                    answer() if callable(answer) else channel.sendall(wire.encode(answer))


@contextlib.contextmanager
def nodes() -> Iterator[Callable[..., Node]]:
    """Makes nodes, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(spec: AgentSpec, answers: Answers, **config: Any) -> Node:
            return stack.enter_context(contextlib.closing(Node(spec, answers, **config)))

        yield make
