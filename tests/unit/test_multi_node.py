"""A node's part in the rendezvous of several: what it says to its member and its launcher, and how long it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.agent import Agent
from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous
from ddplaunch.agent.workers.exit_details import AttemptFailure
from ddplaunch.errors import LaunchError
from ddplaunch.features.slow_ranks.records import SampleCollectives
from ddplaunch.protocol.first_failure import KILLED_HINT
from ddplaunch.protocol.launcher_agent import (
    AttemptEnded,
    FirstRoundFormed,
    JoinRendezvous,
    NodeDeparts,
    Notice,
    OrderToNodes,
    RunIdAgreed,
)
from ddplaunch.protocol.rendezvous import (
    MemberSpec,
    NodeCannotJoin,
    NodeLeft,
    NodeReady,
    NoFreePlace,
    RendezvousLost,
    RoundFormed,
    StopRound,
    WaitingNodes,
    WorkersEnded,
)
from ddplaunch.protocol.results import AttemptResult, RoundVerdict
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.system.files import run_folder
from tests.support.configs import a_round, agent_spec, rendezvous_config
from tests.support.members import GIVE_UP, READY, Node, nodes

ROUND = a_round(node_rank=3, nnodes=4, first_rank=3, world_size=4)
JOINS = {MemberSpec: [READY]}
TAKES_PART = {**JOINS, NodeReady: [RoundFormed(ROUND)]}
FAILED = AttemptResult(0, "failed", (), 1.0)


NewNode = Callable[..., Node]


@pytest.fixture
def new_node() -> Iterator[NewNode]:
    with nodes() as make:
        yield make


@pytest.fixture
def spec(tmp_path: Path) -> AgentSpec:
    folder = run_folder.create(tmp_path, "mine.gpu1")
    return agent_spec(run_id="mine", host="gpu1", node_dir=str(folder))


def in_first_round(
    new_node: NewNode, spec: AgentSpec, *, shares_host: bool = False
) -> tuple[MultiNodeRendezvous, list[object]]:
    """A node that has joined the run ``theirs``, and takes part in its first round; and what its launcher gets."""
    node = new_node(spec, {**JOINS, NodeReady: [RoundFormed(ROUND, shares_host)]})
    assert node.rendezvous.next_round() == (ROUND, None)
    assert node.sent == [RunIdAgreed("theirs")]
    node.sent.clear()
    return node.rendezvous, node.sent


# Where each node has a launcher, its folder is moved into that of the run when the first round is formed.


def test_without_files_the_nodes_agree_on_the_run_id_only(new_node: NewNode, spec: AgentSpec) -> None:
    without = replace(spec, node_dir=None)
    rendezvous, sent = in_first_round(new_node, without)
    assert rendezvous.with_agreed(without) == replace(without, run_id="theirs")
    assert sent == [FirstRoundFormed()]


def test_a_folder_that_cannot_be_moved_is_used_where_it_is(
    new_node: NewNode, spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "move_into_run", fail)
    rendezvous, sent = in_first_round(new_node, spec)
    assert rendezvous.with_agreed(spec) == replace(spec, run_id="theirs")
    text = f"the logs of gpu1 are in {spec.node_dir}, not in the folder of theirs: No space left on device"
    assert sent == [Notice(text, -1), FirstRoundFormed()]


def test_one_launcher_of_all_nodes_has_named_the_folders_already(new_node: NewNode, spec: AgentSpec) -> None:
    node = new_node(replace(spec, one_launcher_leads=True), TAKES_PART)
    node.post(JoinRendezvous(rendezvous_config(server_addresses=("127.0.0.1",), is_server=False)))
    assert node.rendezvous.next_round()
    assert node.rendezvous.with_agreed(spec) is spec


# Rounds.


def test_a_node_tells_the_next_coordinator_of_the_restarts_that_it_has_seen(new_node: NewNode, spec: AgentSpec) -> None:
    verdict = RoundVerdict(0, "failed", attempt_follows=True, restart_follows=True)
    node = new_node(spec, {**TAKES_PART, WorkersEnded: [verdict]})
    assert node.rendezvous.next_round()
    assert node.rendezvous.finish_round(FAILED, has_unkillable=False).restart_follows
    assert node.rendezvous.next_round()
    assert node.told[-1] == NodeReady(3, "gpu1", 1, "127.0.0.1", attempt=1, restart_count=1)


def test_an_order_that_comes_before_the_stop_of_a_round_is_handled_before_it(
    new_node: NewNode, spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may stop the workers in another way, as --stop-before-end does: both come together."""
    order = SampleCollectives(0, 1)
    node = new_node(spec, {**JOINS, NodeReady: [RoundFormed(ROUND), OrderToNodes(order), StopRound(0)]})
    rendezvous, seen = node.rendezvous, list[tuple[object, str | None]]()
    monkeypatch.setattr(
        rendezvous, "handle_event", lambda event: seen.append((event, rendezvous.why_workers_must_stop))
    )
    assert rendezvous.next_round()
    assert node.wait(lambda: rendezvous.why_workers_must_stop is not None)
    assert seen == [(order, None)]


@pytest.mark.parametrize(
    ("is_stopping", "decision"),
    [(True, "not restarted: the run was stopped"), (False, "no further attempt: 127.0.0.1:29400 sent no verdict")],
)
def test_a_node_that_waits_in_vain_for_the_verdict_says_so_unless_it_is_stopped(
    new_node: NewNode, spec: AgentSpec, is_stopping: bool, decision: str
) -> None:
    node = new_node(spec, {**TAKES_PART, WorkersEnded: [GIVE_UP]})
    assert node.rendezvous.next_round()
    node.must_stop = is_stopping
    result = node.rendezvous.finish_round(FAILED, has_unkillable=False)
    assert (result.attempt_follows, result.decision) == (False, decision)


LEFT = "not restarted: processes of the attempt cannot be killed"


@pytest.mark.parametrize(
    ("one_launcher_leads", "has_unkillable", "expected"),
    [
        (True, False, ("stopped", True, "the job goes on with another rendezvous")),
        (True, True, ("failed", False, LEFT)),
        (False, False, ("failed", False, "no further attempt: the rendezvous is lost")),
        (False, True, ("failed", False, LEFT)),
    ],
)
def test_no_attempt_follows_a_lost_rendezvous_on_a_node_with_processes_that_cannot_be_killed(
    new_node: NewNode,
    spec: AgentSpec,
    one_launcher_leads: bool,
    has_unkillable: bool,
    expected: tuple[str, bool, str],
) -> None:
    """They may hold its GPUs, and the coordinator, to which this node has told it, is lost."""
    node = new_node(
        replace(spec, one_launcher_leads=one_launcher_leads),
        {**TAKES_PART, WorkersEnded: [RendezvousLost("no answer")]},
    )
    if one_launcher_leads:
        node.post(JoinRendezvous(rendezvous_config(server_addresses=("127.0.0.1",), is_server=False)))
    assert node.rendezvous.next_round()
    left = replace(FAILED, reason="pids 7 on gpu1 cannot be killed")
    result = node.rendezvous.finish_round(left, has_unkillable=has_unkillable)
    assert (result.outcome, result.attempt_follows, result.decision) == expected
    assert (result.reason == left.reason) == has_unkillable


def test_a_node_that_joins_while_the_last_round_is_stopped_leaves_with_the_result_of_the_job(
    new_node: NewNode, spec: AgentSpec
) -> None:
    node = new_node(spec, {**JOINS, NodeReady: [RoundVerdict(0, "failed", decision="not restarted: no")]})
    node.answers[NodeLeft] = [lambda: node.post(lambda: None)]
    assert node.rendezvous.next_round() is None
    assert node.sent[1:] == [
        Notice("the run has ended; gpu1 was not needed"),
        AttemptEnded(AttemptResult(0, "failed", (), 0.0, decision="not restarted: no")),
    ]
    node.wait(lambda: NodeLeft(3) in node.told)


def test_what_a_rendezvous_says_that_was_left_is_ignored(new_node: NewNode, spec: AgentSpec) -> None:
    config = rendezvous_config(server_addresses=("127.0.0.1",), is_server=False)
    node = new_node(replace(spec, one_launcher_leads=True), JOINS)
    of_other = [RoundFormed(replace(ROUND, master_port=1))]

    def move() -> None:
        node.answers[NodeReady] = [RoundFormed(ROUND)]
        node.post(JoinRendezvous(replace(config, token="job7#1", attempt=1)))

    node.answers[NodeReady] = [move, *of_other]
    node.post(JoinRendezvous(config))
    assert node.rendezvous.next_round() == (ROUND, None)


# The start of a member.


@pytest.mark.parametrize(("returncode", "hint"), [(-9, KILLED_HINT), (-11, ""), (1, ""), (None, "")])
def test_only_a_process_that_was_killed_lets_the_user_look_for_a_kill(returncode: int | None, hint: str) -> None:
    agent: Any = SimpleNamespace(
        outbox=SimpleNamespace(send=lambda _: None),
        is_stopping=lambda: False,
        _kill_helper=lambda _: None,
        _try_member=lambda _: AttemptFailure("gpu1 cannot start another process", returncode),
    )
    with pytest.raises(LaunchError, match="cannot start another process") as raised:
        Agent.start_member(agent, [])
    assert raised.value.hint == hint


# Times.


@pytest.mark.parametrize(("ahead_s", "delay_s"), [(60, 1), (-60, 1), (6, 10), (0, 100), (0, 0)])
@pytest.mark.parametrize("waited_s", [0, 300])
def test_a_clock_is_compared_but_for_the_time_of_records_on_the_way(
    new_node: NewNode, spec: AgentSpec, ahead_s: float, delay_s: float, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived_s = 1000.0 + delay_s
    formed = RoundFormed(ROUND, joined_time_s=arrived_s, time_s=arrived_s + waited_s)
    node = new_node(spec, {**JOINS, NodeReady: [formed]})
    assert node.rendezvous.clock_ahead_s == (float("-inf"), float("inf"))
    times = iter((1000.0 + ahead_s, arrived_s + waited_s + delay_s + ahead_s))
    monkeypatch.setattr(time, "time", lambda: next(times))
    assert node.rendezvous.next_round()
    assert node.rendezvous.clock_ahead_s == (ahead_s - delay_s, ahead_s + delay_s)


def test_a_node_that_joins_again_too_late_for_the_round_takes_no_clock_for_wrong(
    new_node: NewNode, spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = new_node(spec, {**JOINS, NodeReady: []})
    client = node.rendezvous._connect()
    assert client
    now_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    node.rendezvous._join(client)
    now_s = 1300.0
    node.rendezvous.handle_event(NodeDeparts("SLURM drains it"))
    client._handle(RoundFormed(ROUND, joined_time_s=1001.0, time_s=1299.0))  # Sent before the second NodeReady came.
    assert node.rendezvous.clock_ahead_s == (-1.0, 1.0)


def waited_s(new_node: NewNode, spec: AgentSpec, *said: object, **config: float) -> float:
    """How long a node that has joined waits for a round when its member has ``said`` this."""
    node = new_node(spec, {**JOINS, NodeReady: [*said, GIVE_UP]}, **config)
    if spec.one_launcher_leads:
        settings = rendezvous_config(server_addresses=("127.0.0.1",), is_server=False, **config)
        node.post(JoinRendezvous(settings))
    with pytest.raises(LaunchError):
        node.rendezvous.next_round()
    return node.limit_s


def test_the_time_for_more_nodes_is_not_part_of_that_for_enough(new_node: NewNode, spec: AgentSpec) -> None:
    assert waited_s(new_node, spec, WaitingNodes("gpu1", 1, 1)) == pytest.approx(600, abs=20)
    assert waited_s(new_node, spec, WaitingNodes("gpu1", 2, 0), last_call_timeout_s=90.0) == pytest.approx(690, abs=20)
    assert waited_s(new_node, spec, NoFreePlace(("gpu2",))) == float("inf")


def test_nodes_of_one_launcher_wait_for_those_that_still_import(new_node: NewNode, spec: AgentSpec) -> None:
    spec = replace(spec, one_launcher_leads=True)
    assert waited_s(new_node, spec) == float("inf")
    assert waited_s(new_node, spec, attempt=1) == pytest.approx(600, abs=20)


@pytest.mark.parametrize("launcher_assigns", [False, True])
def test_the_time_to_join_begins_when_torch_is_imported(
    new_node: NewNode, spec: AgentSpec, launcher_assigns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = slow_node(new_node, replace(spec, one_launcher_leads=launcher_assigns), monkeypatch)
    with pytest.raises(LaunchError, match="cannot join the other nodes"):
        node.rendezvous.next_round()
    assert node.limit_s == 600.0


def test_the_time_to_tell_the_others_of_a_refusal_begins_when_torch_is_imported(
    new_node: NewNode, spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = slow_node(new_node, spec, monkeypatch)
    node.rendezvous.tell_cannot_join("GPU 2 is broken", 82)
    assert node.limit_s == 30.0


def slow_node(new_node: NewNode, spec: AgentSpec, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose clock stands still but for an hour while torch is imported; then its member says nothing."""
    node, clock = new_node(spec, {MemberSpec: [GIVE_UP]}), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    starts = node.start_member

    def imports_torch(fds: list[int]) -> None:
        clock[0] += 3600.0
        starts(fds)

    node.start_member = imports_torch  # type: ignore[method-assign]
    node.post(JoinRendezvous(rendezvous_config(server_addresses=("127.0.0.1",), is_server=False)))
    return node


def test_the_node_that_serves_reports_at_once_and_stays_until_the_others_have_the_verdict(
    new_node: NewNode, spec: AgentSpec
) -> None:
    """A slow one would not get it, and would end by the SIGTERM that srun sends when this launcher has exited."""
    verdict = RoundVerdict(0, "failed", decision="not restarted: no")
    node = new_node(spec, {**TAKES_PART, WorkersEnded: [verdict]}, is_server=True, port=0, silent_after_s=5.0)
    assert node.rendezvous.next_round()
    assert node.rendezvous.finish_round(FAILED, has_unkillable=False).decision == verdict.decision
    node.outbox.send(GIVE_UP)
    node.close()
    assert node.limit_s == pytest.approx(7, abs=1)


def test_a_node_that_is_refused_tells_the_others(new_node: NewNode, spec: AgentSpec) -> None:
    node = new_node(spec, JOINS)
    node.answers[NodeCannotJoin] = [lambda: node.post(lambda: None)]
    node.rendezvous.tell_cannot_join("GPU 2 is broken", 82)
    node.wait(lambda: NodeCannotJoin(3, "GPU 2 is broken", 82) in node.told)
