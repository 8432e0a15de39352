"""Agents that have got the code become those of the run, with all that they have said meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.features.snapshot.begun import Begun
from ddplaunch.launcher import setup
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.transport.handle import ChannelClosed, FromNode, NodeFacts

FACTS, SAID, CLOSED = NodeFacts(pid=7), Notice("said"), ChannelClosed()


class Hosts:
    """In place of the Transport of three hosts. ``asked`` and ``run`` are what the query and the run get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[object] = []
        self.run: list[object] = []
        self.done: list[object] = []
        self.node_names = ("a", "b", "c")
        monkeypatch.setattr(setup, "transport_for", self._made)
        self.begun = Begun(SimpleNamespace(), "tag", self.asked.append)  # type: ignore[arg-type]
        self.nodes: Any = [SimpleNamespace(handle=self.handle(name)) for name in self.node_names]

    def _made(self, _config: object, _tag: str, _output: object, post: Any) -> Hosts:
        self.post = lambda index, event: post(FromNode(index, event))
        return self

    def handle(self, name: str) -> Any:
        ends = lambda *_: self.done.append(f"{name} ends")  # noqa: E731
        return SimpleNamespace(name=name, end_input=ends, close=lambda *_: None)

    def start(self, index: int, _purpose: str) -> Any:
        self.done.append(f"a new agent on {self.node_names[index]}")
        return self.handle("new")

    def close(self) -> None:
        self.done.append("closed")

    def take(self) -> None:
        """The run begins, with one spare."""
        self.begun.hand_over(self.nodes, 2)
        assert self.begun(*[None] * 3, None, self.run.append) is self.begun  # type: ignore[arg-type]


def test_a_run_gets_the_agents_and_what_they_have_said(monkeypatch: pytest.MonkeyPatch):
    hosts = Hosts(monkeypatch)
    for index in range(3):
        hosts.post(index, FACTS)
    hosts.post(1, SAID)
    assert len(hosts.asked) == 4
    hosts.take()
    assert hosts.done == ["c ends"]
    hosts.post(0, CLOSED)
    hosts.post(2, CLOSED)
    assert hosts.run == []  # Of nodes that it has not started.
    assert [hosts.begun.start(index).name for index in (0, 1)] == ["a", "b"]  # type: ignore[attr-defined]
    assert hosts.run == [FromNode(0, FACTS), FromNode(0, CLOSED), FromNode(1, FACTS), FromNode(1, SAID)]
    hosts.post(1, CLOSED)
    assert hosts.run[-1] == FromNode(1, CLOSED)
    assert len(hosts.asked) == 4


def test_a_spare_gets_a_new_agent(monkeypatch: pytest.MonkeyPatch):
    hosts = Hosts(monkeypatch)
    hosts.take()
    hosts.post(2, CLOSED)
    assert hosts.begun.start(2).name == "new"  # type: ignore[attr-defined]
    assert hosts.run == []
    hosts.post(2, FACTS)
    assert hosts.run == [FromNode(2, FACTS)]


def test_agents_that_no_run_has_started_end(monkeypatch: pytest.MonkeyPatch):
    hosts = Hosts(monkeypatch)
    hosts.take()
    hosts.begun.start(1)
    hosts.begun.close()
    assert hosts.done == ["c ends", "a ends", "closed"]
