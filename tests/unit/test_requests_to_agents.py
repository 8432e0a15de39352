"""An agent that is asked what its workers do: one answer to each question, to the launcher that asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous
from ddplaunch.features.hangs import activity_watch
from ddplaunch.features.hangs.activity_watch import ActivityWatch
from ddplaunch.features.hangs.examiner import Examiner
from ddplaunch.features.hangs.records import ExamineWorkers, NodeEvidence, WorkersExamined
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import OrderToNodes
from ddplaunch.timeouts import TimeoutConfig
from tests.support.configs import agent_spec


class Agent:
    """A watch of a node whose workers need no processes, and what it sends."""

    def __init__(self) -> None:
        self.stacks_requested = 0
        self.mailbox: Mailbox[object] = Mailbox()
        self.reported: list[WorkersExamined] = []
        self.sent_to_launcher: list[WorkersExamined] = []
        group = SimpleNamespace(
            debugged=0,
            debugged_at=0.0,
            attempt=1,
            streams=(),
            workers=(),
            host="node1",
            pids_by_local_rank=dict,
        )
        node: Any = SimpleNamespace(
            spec=agent_spec(timeouts=TimeoutConfig(hang_report_s=None)),
            report=self.reported.append,
            post=self.mailbox.post,
            outbox=SimpleNamespace(send=self.sent_to_launcher.append),
        )
        dumps: Any = SimpleNamespace(request=self._request, texts=())
        self.watch = ActivityWatch(node, group, [dumps], Examiner(), lambda _: NodeEvidence(host="node1"))

    def _request(self, *, resume: bool) -> None:
        assert not resume
        self.stacks_requested += 1

    def run_until(self, condition) -> None:
        """Watch until ``condition`` holds, at most 10 s."""
        end_s = time.monotonic() + 10
        self.watch.begin()
        while not condition():
            event = self.mailbox.get(min(self.watch.run_due(time.monotonic()), end_s))
            assert time.monotonic() < end_s
            if callable(event):
                event()
        self.watch.end(lambda *_: True)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(activity_watch, "_STACKS_APART_S", 0.05)
    return Agent()


def test_workers_that_have_ended_are_reported_at_once(agent: Agent) -> None:
    agent.watch.handle_event(ExamineWorkers(1, 1, is_requested=True))
    agent.run_until(lambda: True)
    agent.watch.handle_event(ExamineWorkers(1, 2, is_requested=True))
    agent.watch.handle_event(ExamineWorkers(1, 3))
    assert agent.reported == [WorkersExamined(1, 1, ()), WorkersExamined(1, 2, ())]


@pytest.mark.parametrize("serves", [True, False])
def test_only_the_node_that_serves_the_rendezvous_asks_the_others(serves: bool) -> None:
    posted: list[object] = []
    sent: list[object] = []
    rendezvous = MultiNodeRendezvous.__new__(MultiNodeRendezvous)
    rendezvous._node = SimpleNamespace(post=posted.append)
    rendezvous._client = SimpleNamespace(is_server=serves, endpoint="node0:29400", send=sent.append)
    order = OrderToNodes(ExamineWorkers(1, 1, is_requested=True))
    rendezvous.handle_event(order)
    alone = ExamineWorkers(1, 1, is_requested=True, all_nodes_at="node0:29400")
    assert (sent, posted) == (([order], []) if serves else ([], [alone]))
