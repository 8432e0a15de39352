"""How the workers start, and what the user reads, if no name server answers for the address of their store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.features import name_servers
from ddplaunch.features.name_servers.agent import NameServersPart
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import Notice
from tests.support.configs import a_round, agent_spec


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The look-ups end when it is set."""
    event = threading.Event()

    def reverse_name(_address: str) -> str:
        event.wait(10)
        return ""

    monkeypatch.setattr(name_servers, "reverse_name", reverse_name)
    monkeypatch.setattr(name_servers, "SLOW_S", 0.01)
    yield event
    event.set()


class Node:
    """An agent with this part only."""

    def __init__(self) -> None:
        self.sent: list[Notice] = []
        self._mailbox: Mailbox[Any] = Mailbox()
        node: Any = SimpleNamespace(
            spec=agent_spec(host="node1"),
            outbox=SimpleNamespace(send=self.sent.append),
            post=self._mailbox.post,
            wait=self._wait,
            is_stopping=lambda: False,
        )
        self._part = NameServersPart(node)

    def _wait(self, done: Callable[[], bool], deadline: float) -> bool:
        while not done() and time.monotonic() < deadline:
            if event := self._mailbox.get(deadline):
                event()
        return done()

    def environ(self, address: str, node_rank: int = 0) -> Any:
        """What the workers of an attempt get."""
        group: Any = None
        self._part.on_attempt(group, a_round(master_addr=address, node_rank=node_rank))
        return self._part.default_environ()


@pytest.mark.parametrize(
    ("address", "line"), [("127.0.0.1", "::ffff:127.0.0.1 localhost"), ("fd00::1", "fd00::1 NAME")]
)
def test_the_line_has_the_form_that_torch_looks_up_and_is_shown_once(
    answer: threading.Event, address: str, line: str
) -> None:
    node = Node()
    for _attempt in range(2):
        assert node.environ(address, node_rank=1) == {"RES_OPTIONS": "timeout:1 attempts:1"}
    assert [(f"`{line}`" in notice.text, notice.level) for notice in node.sent] == [(True, 0)]


@pytest.mark.parametrize("address", ["localhost", "an..empty.label"])
def test_an_answer_changes_nothing_and_what_is_no_name_is_left_to_the_workers(
    answer: threading.Event, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_servers, "SLOW_S", 30.0)
    answer.set()
    node = Node()
    assert (node.environ(address), node.sent) == ({}, [])
