"""Where every node has a launcher, its folder is moved into that of the run when the first round is formed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.rendezvous.client import RendezvousClient
from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous
from ddplaunch.agent.rendezvous.single_node import AgentCallbacks
from ddplaunch.errors import LaunchError
from ddplaunch.protocol.launcher_agent import FirstRoundFormed, JoinRendezvous, Notice
from ddplaunch.protocol.rendezvous import MemberReady, NodeJoined, RoundFormed
from ddplaunch.protocol.results import AttemptResult, RoundVerdict
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.system.files import run_folder
from tests.support.configs import a_round, agent_spec, rendezvous_config

ROUND = a_round(node_rank=3, nnodes=4, first_rank=3, world_size=4)


@pytest.fixture
def spec(tmp_path: Path) -> AgentSpec:
    folder = run_folder.create(tmp_path, "mine.gpu1")
    return agent_spec(run_id="mine", host="gpu1", node_dir=str(folder))


def joined(spec: AgentSpec, sent: list[object], *, shares_host: bool = False) -> MultiNodeRendezvous:
    """A node that has joined the run ``theirs``, and takes part in its first round."""
    callbacks = AgentCallbacks(lambda *_: True, lambda: False, lambda _: None, sent.append, lambda _: None)
    rendezvous = MultiNodeRendezvous(spec, 1, callbacks)
    client = SimpleNamespace(ready=MemberReady(3, "10.0.0.1", 1, "theirs", "key"), is_spare=False)
    rendezvous._client = client  # type: ignore[assignment]
    rendezvous._handle_record(client, RoundFormed(ROUND, shares_host))  # type: ignore[arg-type]
    return rendezvous


@pytest.mark.parametrize(("shares_host", "name"), [(False, "gpu1"), (True, "gpu1.3")])
def test_the_folder_is_moved_once_and_named_after_the_host(
    spec: AgentSpec, tmp_path: Path, shares_host: bool, name: str
) -> None:
    sent: list[object] = []
    rendezvous = joined(spec, sent, shares_host=shares_host)
    folder = str(tmp_path / "theirs" / name)
    completed = rendezvous.complete(spec)
    assert completed == replace(spec, run_id="theirs", node_dir=folder)
    assert rendezvous.complete(completed) is completed
    assert sent == [FirstRoundFormed(("theirs", name))]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_node_tells_the_next_coordinator_of_the_restarts_that_it_has_seen(spec: AgentSpec) -> None:
    rendezvous, sent = joined(spec, []), []
    client = SimpleNamespace(index=0, has_left=False, server_address="", send=sent.append, lost_reason=None)
    client.config = SimpleNamespace(silent_after_s=5.0)
    rendezvous._client = client  # type: ignore[assignment]
    rendezvous._verdict = RoundVerdict(0, "failed", attempt_follows=True, restart_follows=True)
    assert rendezvous.finish_round(AttemptResult(0, "failed", (), 1.0), has_unkillable=False).restart_follows
    rendezvous._join(client)  # type: ignore[arg-type]
    assert sent[-1] == NodeJoined(0, "gpu1", 1, restarts_so_far=1)


@pytest.mark.parametrize(
    ("is_stopping", "decision"), [(True, "the run was stopped"), (False, "10.0.0.1:29400 sent no verdict")]
)
def test_a_node_that_waits_in_vain_for_the_verdict_says_so_unless_it_is_stopped(
    spec: AgentSpec, is_stopping: bool, decision: str
) -> None:
    rendezvous = joined(spec, [])
    rendezvous._callbacks = rendezvous._callbacks._replace(is_stopping=lambda: is_stopping)
    client = SimpleNamespace(index=0, has_left=False, send=lambda _: None, lost_reason=None, endpoint="10.0.0.1:29400")
    client.config = SimpleNamespace(silent_after_s=5.0)
    rendezvous._client = client  # type: ignore[assignment]
    result = rendezvous.finish_round(AttemptResult(0, "failed", (), 1.0), has_unkillable=False)
    assert (result.attempt_follows, result.decision) == (False, f"not restarted: {decision}")


def test_without_files_the_nodes_agree_on_the_run_id_only(spec: AgentSpec) -> None:
    sent: list[object] = []
    without = replace(spec, node_dir=None)
    assert joined(without, sent).complete(without) == replace(without, run_id="theirs")
    assert sent == [FirstRoundFormed()]


def test_a_folder_that_cannot_be_moved_is_used_where_it_is(spec: AgentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    sent: list[object] = []
    monkeypatch.setattr(run_folder, "move_into_run", fail)
    assert joined(spec, sent).complete(spec) == replace(spec, run_id="theirs")
    text = f"the logs of gpu1 are in {spec.node_dir}, not in the folder of theirs: No space left on device"
    assert sent == [Notice(text, -1), FirstRoundFormed()]


def test_one_launcher_of_all_nodes_has_named_the_folders_already(spec: AgentSpec) -> None:
    spec = replace(spec, launcher_assigns_rendezvous=True)
    assert joined(spec, []).complete(spec) is spec


# Times.


@pytest.mark.parametrize(("ahead_s", "delay_s"), [(60, 1), (-60, 1), (6, 10), (0, 100), (0, 0)])
@pytest.mark.parametrize("waited_s", [0, 300])
def test_a_clock_is_compared_but_for_the_time_of_records_on_the_way(
    spec: AgentSpec, ahead_s: float, delay_s: float, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous, client = joined(spec, []), SimpleNamespace(index=0, server_address="", send=lambda _: None)
    rendezvous._client = client  # type: ignore[assignment]
    assert rendezvous.clock_ahead_s == (float("-inf"), float("inf"))
    arrived_s = 1000.0 + delay_s
    times = iter((1000.0 + ahead_s, arrived_s + waited_s + delay_s + ahead_s))
    monkeypatch.setattr(time, "time", lambda: next(times))
    rendezvous._join(client)  # type: ignore[arg-type]
    formed = RoundFormed(ROUND, joined_time_s=arrived_s, time_s=arrived_s + waited_s)
    rendezvous._handle_record(SimpleNamespace(), RoundFormed(ROUND))  # type: ignore[arg-type]  # Of one that was left.
    rendezvous._handle_record(client, formed)  # type: ignore[arg-type]
    assert rendezvous.clock_ahead_s == (ahead_s - delay_s, ahead_s + delay_s)


IMPORT_S = ENDPOINT_S = 3600.0


class SlowNode:
    """A node that imports torch for an hour, after an hour in which its launcher has not told it where to meet."""

    def __init__(self, spec: AgentSpec, monkeypatch: pytest.MonkeyPatch, *, launcher_assigns: bool) -> None:
        self.now = 0.0
        self.limits_s: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.config = rendezvous_config(server_addresses=("127.0.0.1",), is_server=False, join_timeout_s=5.0)
        callbacks = AgentCallbacks(self.wait, lambda: False, self.import_torch, lambda _: None, lambda _: None)
        given = None if launcher_assigns else self.config
        spec = replace(spec, rendezvous=given, launcher_assigns_rendezvous=launcher_assigns, node_dir=None)
        self.rendezvous = MultiNodeRendezvous(spec, 1, callbacks)

    @property
    def client(self) -> RendezvousClient:
        assert self.rendezvous._client
        return self.rendezvous._client

    def import_torch(self, fds: list[int]) -> None:
        self.now += IMPORT_S
        for fd in fds:
            os.close(fd)

    def wait(self, done: Any, deadline: Any = float("inf")) -> bool:
        if done():
            return True
        limit_s = (deadline() if callable(deadline) else deadline) - self.now
        if limit_s < float("inf"):
            self.limits_s.append(limit_s)
            return False
        self.now += ENDPOINT_S
        self.rendezvous.handle_event(JoinRendezvous(self.config))
        return True


@pytest.fixture
def slow_node(spec: AgentSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], SlowNode]]:
    """``slow_node(launcher_assigns)``."""
    with contextlib.ExitStack() as stack:

        def make(launcher_assigns: bool) -> SlowNode:
            node = SlowNode(spec, monkeypatch, launcher_assigns=launcher_assigns)
            stack.callback(lambda: node.client.close())
            return node

        yield make


@pytest.mark.parametrize("launcher_assigns", [False, True])
def test_the_time_to_join_begins_when_torch_is_imported(
    slow_node: Callable[[bool], SlowNode], launcher_assigns: bool
) -> None:
    node = slow_node(launcher_assigns)
    with pytest.raises(LaunchError, match="cannot join the other nodes"):
        node.rendezvous.next_round()
    assert node.limits_s == [5.0]


@pytest.mark.parametrize(("launcher_assigns", "limit_s"), [(False, 5.0), (True, float("inf"))])
def test_nodes_of_one_launcher_wait_for_those_that_still_import(
    slow_node: Callable[[bool], SlowNode], launcher_assigns: bool, limit_s: float
) -> None:
    node = slow_node(launcher_assigns)
    with pytest.raises(LaunchError):
        node.rendezvous.next_round()
    node.client.index = 1
    assert node.client.join_deadline() - node.now == limit_s
    node.client.start_clock()
    assert node.client.join_deadline() - node.now == 5.0


def test_the_time_to_tell_the_others_of_a_refusal_begins_when_torch_is_imported(
    slow_node: Callable[[bool], SlowNode],
) -> None:
    node = slow_node(False)
    node.rendezvous.refuse("GPU 2 is broken")
    assert node.limits_s == [5.0]
