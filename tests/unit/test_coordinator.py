"""Rounds are decided right whatever the order of events: scripted histories through the real coordinator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddplaunch.features.hangs.records import WorkerActivity
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import AssignNodes, ReportOfNode
from ddplaunch.protocol.rendezvous import (
    AllNodesLeft,
    ListenForWorkersStore,
    NodeJoined,
    NodeLeft,
    NodeRefused,
    NodeStops,
    NoFreePlace,
    ReportToServer,
    RoundFormed,
    StopRound,
    WaitingNodes,
    WorkersEnded,
    WorkersStoreListens,
)
from ddplaunch.protocol.results import NEVER_RESTARTED, RoundVerdict, WorkerError, WorkerExit
from ddplaunch.rounds.coordinator import Coordinator, Outgoing
from ddplaunch.rounds.restart_policy import Restarts

TOKEN = "job7"
SUCCEEDED = RoundVerdict(0, "succeeded", decision="all workers have succeeded")
LEFT = "not restarted: processes of the attempt cannot be killed"
STOPPED = "not restarted: the run was stopped"


def coordinate(
    server: int, least: int, most: int, restarts: int, assigned: tuple[int, ...] = (), **given: Any
) -> Coordinator:
    return Coordinator(server, least, most, Restarts(restarts), assigned, **given)


def end(
    index: int, attempt: int, failed: bool = False, stopped: bool = False, leaves: str = "", **told: object
) -> WorkersEnded:
    outcome = "failed" if failed else "stopped" if stopped else "succeeded"
    return WorkersEnded(attempt, outcome, node_index=index, stopped=stopped, node_leaves=leaves, **told)  # type: ignore[arg-type]


def join(index: int, size: int = 2) -> NodeJoined:
    return NodeJoined(index, f"host{index}", size)


def exit_(rank: int, message: str = "ValueError: no") -> WorkerExit:
    error = WorkerError(message, "", 0.0)
    return WorkerExit(rank, 0, f"host{rank}", 1, 1, stopped=False, time_s=0.0, duration_s=1.0, error=error)


def records(sent: list[Outgoing], kind: type) -> dict[int, object]:
    return {message.node_index: message.record for message in sent if isinstance(message.record, kind)}


def started(coordinator: Coordinator, *indices: int) -> list[Outgoing]:
    """Let nodes join and the first of them listen."""
    sent = [message for index in indices for message in coordinator.receive(join(index))]
    first = next(message for message in sent if isinstance(message.record, ListenForWorkersStore))
    assert first.node_index == coordinator.participants[0]
    return coordinator.receive(WorkersStoreListens(coordinator.participants[0], coordinator.attempt, "10.0.0.1", 1234))


def ended(coordinator: Coordinator, *ends: WorkersEnded) -> list[Outgoing]:
    return [message for end in ends for message in coordinator.receive(end)]


def test_ranks_are_in_node_order_whatever_the_order_of_arrival():
    rounds = records(started(coordinate(0, 3, 3, 0), 2, 0, 1), RoundFormed)
    assert {index: formed.round.node_rank for index, formed in rounds.items()} == {0: 0, 1: 1, 2: 2}
    assert {formed.round.master_port for formed in rounds.values()} == {1234}


def test_restarts_that_a_node_has_seen_are_counted_by_the_next_coordinator_too():
    """The launcher names their number, and may not have read yet what the lost one had decided last."""
    coordinator = coordinate(0, 2, 2, 1, assigned=(0, 1))
    for node in (join(0), replace(join(1), attempt=1, restarts_so_far=1)):
        coordinator.receive(node)
    rounds = records(coordinator.receive(WorkersStoreListens(0, 1, "10.0.0.1", 1234)), RoundFormed)
    assert {(formed.round.attempt, formed.round.restart_count) for formed in rounds.values()} == {(1, 1)}
    over = records(ended(coordinator, end(0, 1, True), end(1, 1)), RoundVerdict)
    assert not any(verdict.attempt_follows for verdict in over.values())


def test_a_node_is_told_whether_it_shares_its_host():
    coordinator = coordinate(0, 3, 3, 0)
    sent = [
        message
        for index, host in enumerate(("gpu1", "gpu2", "gpu1"))
        for message in coordinator.receive(NodeJoined(index, host, 1))
    ]
    assert list(records(sent, ListenForWorkersStore)) == [0]
    formed = records(coordinator.receive(WorkersStoreListens(0, 0, "10.0.0.1", 1234)), RoundFormed)
    assert {index: record.shares_host for index, record in formed.items()} == {0: True, 1: False, 2: True}


def test_who_waits_hears_who_else_does():
    coordinator = coordinate(0, 4, 4, 0)
    assert coordinator.waiting_nodes() == []
    for index in (2, 0, 1):
        assert coordinator.receive(join(index)) == []
    assert coordinator.waiting_nodes() == [Outgoing(index, WaitingNodes("host[0-2]", 3, 1)) for index in (2, 0, 1)]
    coordinator.receive(join(3))
    assert coordinator.waiting_nodes() == [], "nobody is waited for any more"


def test_only_the_node_that_serves_tells_one_launcher_of_all_the_cause():
    coordinator = with_launcher(5, 2)
    started(coordinator, 5, 2)
    cause = replace(exit_(0), host="host2")
    over = records(ended(coordinator, end(5, 0), end(2, 0, failed=True, cause=cause)), RoundVerdict)
    assert {index: verdict.cause for index, verdict in over.items()} == {5: cause, 2: None}


def test_what_a_node_is_told_does_not_grow_with_the_others():
    rounds = [records(started(with_launcher(*range(count)), *range(count)), RoundFormed)[0] for count in (10, 999)]
    few, many = (len(wire.encode(record)) for record in rounds)
    assert many - few < 10


def test_different_worker_counts_give_contiguous_ranks():
    """torchrun: agent_api_test 8."""
    coordinator, sizes = coordinate(0, 5, 5, 0), (4, 1, 2, 3, 5)
    for index, size in enumerate(sizes):
        coordinator.receive(join(index, size))
    rounds = records(coordinator.receive(WorkersStoreListens(0, 0, "a", 1)), RoundFormed)
    given = [(r.round.first_rank, r.round.local_world_size, r.round.world_size) for r in rounds.values()]
    assert given == [(0, 4, 15), (4, 1, 15), (5, 2, 15), (7, 3, 15), (10, 5, 15)]


def test_all_succeed_and_the_serving_node_stays_until_the_others_have_heard():
    """torchrun: test_run 14; local_elastic_agent_test 17."""
    coordinator = coordinate(0, 2, 2, 0)
    started(coordinator, 0, 1)
    assert ended(coordinator, end(0, 0)) == []
    assert ended(coordinator, end(1, 0)) == [Outgoing(i, SUCCEEDED) for i in (0, 1)]
    assert coordinator.receive(NodeLeft(1)) == [Outgoing(0, AllNodesLeft())]


def test_a_failure_stops_every_node_at_once_and_ends_the_run():
    coordinator = coordinate(0, 2, 2, 0)
    started(coordinator, 0, 1)
    assert set(records(coordinator.receive(NodeStops(1, 0)), StopRound)) == {0, 1}
    cause = replace(exit_(2), host="host1")
    over = records(ended(coordinator, end(0, 0), end(1, 0, failed=True, cause=cause)), RoundVerdict)
    assert over == {i: RoundVerdict(0, "failed", cause=cause, decision=NEVER_RESTARTED) for i in (0, 1)}


def test_all_nodes_learn_that_the_job_hung_also_one_whose_worker_failed_before_it_could_be_stopped():
    coordinator = coordinate(0, 2, 2, 0)
    started(coordinator, 0, 1)
    reports = end(0, 0, failed=True, hung=True), end(1, 0, failed=True, cause=exit_(1))
    assert all(record.hung for record in records(ended(coordinator, *reports), RoundVerdict).values())


def test_a_failure_with_restarts_left_starts_another_round_with_one_count_for_all():
    coordinator = coordinate(0, 2, 2, 1)
    started(coordinator, 0, 1)
    over = records(ended(coordinator, end(0, 0, failed=True), end(1, 0)), RoundVerdict)
    assert all(record.attempt_follows for record in over.values())
    rounds = records(started(coordinator, 1, 0), RoundFormed)
    assert {(r.round.attempt, r.round.restart_count) for r in rounds.values()} == {(1, 1)}
    over = records(ended(coordinator, end(0, 1, failed=True), end(1, 1)), RoundVerdict)
    assert not any(record.attempt_follows for record in over.values())


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2)])
def test_no_attempt_follows_where_processes_cannot_be_killed(nodes: tuple[int, int]):
    """They may hold GPUs and memory, as on a single node."""
    coordinator = coordinate(0, *nodes, 5)
    started(coordinator, 0, 1)
    left = end(1, 0, failed=True, reason="pids 7 on gpu2 cannot be killed", has_unkillable=True)
    over = records(ended(coordinator, end(0, 0, failed=True, cause=exit_(0)), left), RoundVerdict)
    verdict = RoundVerdict(0, "failed", reason=left.reason, cause=exit_(0), decision=LEFT)
    assert over == {0: verdict, 1: verdict}


def test_a_node_speaks_for_its_own_host():
    coordinator = coordinate(0, 2, 2, 0)
    started(coordinator, 0, 1)
    said = WorkerActivity(0, quiet_s=1.0, host="host0")
    (sent,) = coordinator.receive(ReportToServer(1, said))
    assert sent == Outgoing(0, ReportOfNode(1, (0, 1), replace(said, host="host1")))
    lie = replace(exit_(1), host="host0")
    over = records(ended(coordinator, end(0, 0), end(1, 0, failed=True, cause=lie)), RoundVerdict)
    assert {record.cause.host for record in over.values() if record.cause} == {"host1"}


def test_a_failure_that_a_restart_cannot_help_is_not_tried_again():
    coordinator, cause = coordinate(0, 2, 2, 5), exit_(1, "SyntaxError: invalid syntax")
    started(coordinator, 0, 1)
    over = records(ended(coordinator, end(0, 0), end(1, 0, failed=True, cause=cause)), RoundVerdict)
    assert not any(record.attempt_follows for record in over.values())
    assert {record.decision for record in over.values()} == {"not restarted: the script cannot be parsed"}


def fail_in_turn(coordinator: Coordinator, *nodes: int, lost: int | None = None) -> RoundVerdict:
    """Each time of two nodes one fails by the same error, and the other for want of it; the last verdict."""
    for node in nodes:
        started(coordinator, 0, 1)
        if node == lost:
            coordinator.receive(NodeLeft(1 - node))
        attempt = coordinator.attempt
        coordinator.receive(NodeStops(node, attempt))
        lost_peer = replace(exit_(1 - node, "RuntimeError: Connection closed by peer [10.0.0.1]"), time_s=-1.0)
        ends = (
            end(node, attempt, failed=True, cause=failing(node)),
            end(1 - node, attempt, True, cause=lost_peer),
        )
        over = records(ended(coordinator, *ends), RoundVerdict)[node]
    return over


def failing(rank: int) -> WorkerExit:
    cause = exit_(rank, "KeyError: 'x'")
    traceback = "Traceback (most recent call last):\n  File ...\nKeyError: 'x'\n"
    return replace(cause, error=WorkerError("KeyError: 'x'", traceback, 0.0))


def test_the_same_error_ends_the_run_whichever_node_comes_to_it_first():
    """resilience 3.2 #22."""
    coordinator = coordinate(0, 2, 2, 9)
    assert fail_in_turn(coordinator, 0, 1).attempt_follows
    over = fail_in_turn(coordinator, 1)
    assert (over.attempt_follows, over.outcome, over.cause) == (False, "failed", failing(1))
    assert over.decision.startswith("not restarted again: 3 attempts in a row ended by the same exception")


def test_the_last_of_all_restarts_is_not_said_to_be_given_up():
    over = fail_in_turn(coordinate(0, 2, 2, 2), 0, 0, 0)
    assert (over.attempt_follows, over.decision) == (False, "not restarted: 2 of 2 restarts used")


def test_a_round_that_lost_a_node_is_none_of_those_that_ended_alike():
    coordinator = coordinate(0, 1, 2, 9)
    assert fail_in_turn(coordinator, 0, 0).attempt_follows
    assert fail_in_turn(coordinator, 0, lost=0).attempt_follows
    assert fail_in_turn(coordinator, 0, 0).attempt_follows
    assert not fail_in_turn(coordinator, 0).attempt_follows


def test_the_cause_is_what_came_first_unless_it_only_lost_its_peer():
    coordinator = coordinate(0, 3, 3, 0)
    started(coordinator, 0, 1, 2)
    for index in (2, 0, 1):
        coordinator.receive(NodeStops(index, 0))
    ends = [
        end(1, 0, failed=True, cause=exit_(1)),
        end(0, 0, failed=True, cause=exit_(0)),
        end(2, 0, failed=True, cause=exit_(2, "RuntimeError: Connection closed by peer [10.0.0.1]")),
    ]
    over = records(ended(coordinator, *ends), RoundVerdict)
    assert over[0].cause.rank == 0


def test_a_lost_node_ends_a_run_of_fixed_size_and_is_named():
    coordinator = coordinate(0, 2, 2, 3)
    started(coordinator, 0, 1)
    assert set(records(coordinator.receive(NodeLeft(1)), StopRound)) == {0}
    sent = ended(coordinator, end(0, 0))
    decision = "not restarted: 1 other node is left, and 2 are needed"
    over = RoundVerdict(0, "failed", reason="host1 (node 1) is lost", decision=decision)
    assert records(sent, RoundVerdict)[0] == over
    assert Outgoing(0, AllNodesLeft()) in sent


def test_a_lost_node_starts_a_smaller_round_that_costs_no_restart():
    """torchrun: agent_api_test 7."""
    coordinator = coordinate(0, 1, 2, 0)
    started(coordinator, 0, 1)
    coordinator.receive(NodeLeft(1))
    assert records(ended(coordinator, end(0, 0)), RoundVerdict)[0].attempt_follows
    coordinator.receive(join(0))
    assert coordinator.has_enough
    coordinator.last_call_expired()
    rounds = records(coordinator.receive(WorkersStoreListens(0, 1, "a", 1)), RoundFormed)
    assert (rounds[0].round.restart_count, rounds[0].round.world_size) == (0, 2)


def test_a_replacement_takes_the_lost_nodes_rank_and_the_others_keep_theirs():
    coordinator = coordinate(0, 2, 3, 0)
    started(coordinator, 0, 1, 2)
    coordinator.receive(NodeLeft(1))
    ended(coordinator, end(0, 0), end(2, 0))
    rounds = records(started(coordinator, 2, 0, 7), RoundFormed)
    assert {index: formed.round.node_rank for index, formed in rounds.items()} == {0: 0, 7: 1, 2: 2}


def test_a_node_that_comes_later_starts_a_larger_round():
    coordinator = coordinate(0, 1, 2, 0)
    coordinator.receive(join(0))
    coordinator.last_call_expired()
    coordinator.receive(WorkersStoreListens(0, 0, "a", 1))
    assert set(records(coordinator.receive(join(1)), StopRound)) == {0}
    assert records(ended(coordinator, end(0, 0)), RoundVerdict)[0].attempt_follows
    coordinator.receive(join(0))
    rounds = records(coordinator.receive(WorkersStoreListens(0, 1, "a", 1)), RoundFormed)
    assert {formed.round.world_size for formed in rounds.values()} == {4}


@pytest.mark.parametrize(("message", "failed"), [("RuntimeError: Connection reset by peer", False), ("no", True)])
def test_a_worker_that_loses_peers_stopped_for_a_node_that_comes_has_not_failed(message: str, failed: bool):
    coordinator = coordinate(0, 1, 3, 0)
    for index in (0, 1):
        coordinator.receive(join(index))
    coordinator.last_call_expired()
    coordinator.receive(WorkersStoreListens(0, 0, "a", 1))
    assert set(records(coordinator.receive(join(2)), StopRound)) == {0, 1}
    ends = end(0, 0, failed=True, cause=exit_(0, message)), end(1, 0)
    verdict = records(ended(coordinator, *ends), RoundVerdict)[0]
    assert (verdict.outcome, verdict.attempt_follows) == ("failed" if failed else "stopped", not failed)


def test_a_node_that_comes_before_the_round_has_begun_is_part_of_it():
    coordinator = coordinate(0, 1, 3, 0)
    coordinator.receive(join(0))
    assert records(coordinator.last_call_expired(), ListenForWorkersStore)
    coordinator.receive(join(1))
    rounds = records(coordinator.receive(WorkersStoreListens(0, 0, "a", 1)), RoundFormed)
    assert {index: (formed.round.node_rank, formed.round.world_size) for index, formed in rounds.items()} == {
        0: (0, 4),
        1: (1, 4),
    }
    assert coordinator.receive(WorkersStoreListens(0, 0, "a", 1)) == []


def test_a_node_for_which_there_is_no_place_waits_until_one_is_lost():
    coordinator = coordinate(0, 1, 2, 0)
    started(coordinator, 0, 1)
    assert coordinator.receive(join(2)) == [Outgoing(2, NoFreePlace(("host0", "host1")))]
    coordinator.receive(NodeLeft(1))
    ended(coordinator, end(0, 0))
    assert records(coordinator.receive(join(0)), ListenForWorkersStore)
    rounds = records(coordinator.receive(WorkersStoreListens(0, 1, "a", 1)), RoundFormed)
    assert {index: formed.round.node_rank for index, formed in rounds.items()} == {0: 0, 2: 1}


def test_it_takes_no_place_from_one_that_comes_again_a_little_later():
    coordinator = coordinate(0, 1, 2, 1)
    started(coordinator, 0, 1)
    coordinator.receive(join(2))
    ended(coordinator, end(0, 0, failed=True), end(1, 0))
    assert not records(coordinator.receive(join(0)), ListenForWorkersStore)
    assert records(coordinator.receive(join(1)), ListenForWorkersStore)
    assert coordinator.participants == [0, 1]


def test_one_that_waits_for_a_place_to_the_end_hears_the_verdict():
    coordinator = coordinate(0, 1, 2, 0)
    started(coordinator, 0, 1)
    coordinator.receive(join(2))
    sent = ended(coordinator, end(0, 0), end(1, 0))
    assert sent == [Outgoing(i, SUCCEEDED) for i in (0, 1, 2)]
    assert coordinator.receive(NodeLeft(2)) == []
    assert coordinator.receive(NodeLeft(1)) == [Outgoing(0, AllNodesLeft())]


def test_a_node_that_was_told_to_stop_ends_the_run_for_all():
    coordinator = coordinate(0, 1, 2, 3)
    started(coordinator, 0, 1)
    assert records(coordinator.receive(end(1, 0, stopped=True)), StopRound)
    over = records(ended(coordinator, end(0, 0)), RoundVerdict)[0]
    assert (over.attempt_follows, over.outcome, over.reason) == (False, "stopped", "host1 was stopped")


def test_all_nodes_get_the_reason_that_the_stopped_node_knows():
    coordinator = coordinate(0, 1, 2, 3)
    started(coordinator, 0, 1)
    coordinator.receive(end(1, 0, stopped=True, reason="another process sent SIGTERM"))
    over = records(ended(coordinator, end(0, 0)), RoundVerdict).values()
    assert {verdict.reason for verdict in over} == {"another process sent SIGTERM"}


def test_who_misses_the_workers_of_a_stopped_node_is_not_blamed():
    coordinator = coordinate(0, 2, 2, 3)
    started(coordinator, 0, 1)
    coordinator.receive(NodeStops(0, 0))
    missing = end(0, 0, failed=True, cause=exit_(0, "RuntimeError: Connection closed by peer [10.0.0.1]"))
    over = records(ended(coordinator, missing, end(1, 0, stopped=True)), RoundVerdict)[0]
    assert over == RoundVerdict(0, "stopped", reason="host1 was stopped", decision=STOPPED)


def test_a_failure_stays_one_though_somebody_stops_the_run_then():
    coordinator = coordinate(0, 2, 2, 3)
    started(coordinator, 0, 1)
    cause = exit_(0, "ValueError: no")
    over = records(ended(coordinator, end(0, 0, failed=True, cause=cause), end(1, 0, stopped=True)), RoundVerdict)[0]
    assert (over.attempt_follows, over.outcome, over.cause, over.decision) == (False, "failed", cause, STOPPED)


def test_late_messages_of_an_earlier_round_change_nothing():
    coordinator = coordinate(0, 2, 2, 1)
    started(coordinator, 0, 1)
    ended(coordinator, end(0, 0, failed=True), end(1, 0))
    started(coordinator, 0, 1)
    assert coordinator.receive(NodeStops(1, 0)) == []
    assert coordinator.receive(end(1, 0, failed=True)) == []
    assert coordinator.receive(WorkersStoreListens(0, 0, "old", 1)) == []


def test_a_node_that_comes_after_the_end_is_told_so():
    """torchrun: rendezvous 16."""
    coordinator = coordinate(0, 1, 1, 0)
    started(coordinator, 0)
    ended(coordinator, end(0, 0))
    (sent,) = coordinator.receive(join(5))
    assert "had ended" in sent.record.reason


# A launcher says who takes part.


def with_launcher(*participants: int) -> Coordinator:
    return coordinate(participants[0], 1, 9, 0, tuple(participants))


def test_a_round_forms_when_all_that_are_expected_have_come_in_the_order_of_their_seats():
    coordinator = with_launcher(0, 5, 2)
    coordinator.receive(join(2))
    coordinator.receive(join(0))
    assert not coordinator.has_enough, "no last call: the launcher knows who comes"
    sent = coordinator.receive(join(5))
    assert records(sent, ListenForWorkersStore)
    assert coordinator.participants == [0, 5, 2]


def test_the_store_listens_where_most_nodes_have_reached_the_first():
    coordinator = with_launcher(0, 1, 2)
    coordinator.receive(join(0))
    for index in (1, 2):
        sent = coordinator.receive(NodeJoined(index, f"host{index}", 1, server_address="10.1.0.1"))
    assert records(sent, ListenForWorkersStore) == {0: ListenForWorkersStore(0, "10.1.0.1")}


def test_a_node_that_is_expected_no_more_ends_the_round_and_the_others_go_on():
    coordinator = with_launcher(0, 1, 2)
    started(coordinator, 0, 1, 2)
    assert records(coordinator.receive(AssignNodes(TOKEN, (0, 2))), StopRound).keys() == {0, 2}
    over = records(ended(coordinator, end(0, 0), end(2, 0)), RoundVerdict)
    assert {(verdict.attempt_follows, verdict.restart_follows) for verdict in over.values()} == {(True, False)}
    sent = [*coordinator.receive(join(2)), *coordinator.receive(join(0))]
    assert records(sent, ListenForWorkersStore)


def test_its_spare_is_waited_for_and_takes_its_seat():
    coordinator = with_launcher(0, 1)
    started(coordinator, 0, 1)
    coordinator.receive(AssignNodes(TOKEN, (0, 7)))
    ended(coordinator, end(0, 0))
    assert not records(coordinator.receive(join(0)), ListenForWorkersStore)
    assert records(coordinator.receive(join(7)), ListenForWorkersStore)
    assert coordinator.participants == [0, 7]


def test_workers_that_fail_for_want_of_a_lost_nodes_workers_use_up_no_restart():
    coordinator = with_launcher(0, 1)
    started(coordinator, 0, 1)
    coordinator.receive(NodeStops(0, 0))
    cause = exit_(0, "RuntimeError: Connection closed by peer")
    coordinator.receive(end(0, 0, failed=True, cause=cause))
    over = records(coordinator.receive(AssignNodes(TOKEN, (0,))), RoundVerdict)
    assert over[0].attempt_follows
    assert not over[0].restart_follows


def test_the_decision_after_a_loss_names_a_failure_that_had_another_cause_and_that_no_restart_may_follow():
    coordinator = coordinate(0, 2, 3, 0)
    started(coordinator, 0, 1, 2)
    coordinator.receive(NodeLeft(2))
    told = verdicts(ended(coordinator, end(0, 0, failed=True, cause=exit_(0, "KeyError: 'lr'")), end(1, 0)))
    assert {over.reason for over in told.values()} == {"host2 (node 2) is lost"}
    assert {over.decision for over in told.values()} == {
        "not restarted: --max-restarts is 0, and a worker has failed, not because of the loss"
    }


def test_the_store_of_a_node_that_is_lost_meanwhile_is_not_used():
    coordinator = with_launcher(1, 0)
    coordinator.receive(join(1))
    assert records(coordinator.receive(join(0)), ListenForWorkersStore).keys() == {1}
    assert records(coordinator.receive(AssignNodes(TOKEN, (0,))), ListenForWorkersStore).keys() == {0}
    assert coordinator.receive(WorkersStoreListens(1, 0, "of the lost node", 1)) == []
    [sent] = coordinator.receive(WorkersStoreListens(0, 0, "of the first", 1))
    assert isinstance(sent.record, RoundFormed)
    assert sent.record.round.master_addr == "of the first"


def test_a_node_that_joins_after_it_was_given_up_is_not_counted():
    coordinator = with_launcher(0, 1, 2)
    coordinator.receive(join(0))
    coordinator.receive(AssignNodes(TOKEN, (0, 2)))
    assert coordinator.receive(join(1)) == []
    assert coordinator.waiting_nodes()[0].record == WaitingNodes("host0", 1, 1)
    assert records(coordinator.receive(join(2)), ListenForWorkersStore)
    assert coordinator.participants == [0, 2]


def test_a_number_that_a_node_has_had_at_an_earlier_rendezvous_is_not_used_again():
    coordinator = coordinate(0, 2, 2, 0, assigned=(0, 1), attempt=1)
    coordinator.receive(join(0))
    [sent] = coordinator.receive(replace(join(1), attempt=3))
    assert sent == Outgoing(0, ListenForWorkersStore(3, ""))
    rounds = records(coordinator.receive(WorkersStoreListens(0, 3, "a", 1)), RoundFormed)
    assert {formed.round.attempt for formed in rounds.values()} == {3}


def test_a_node_that_is_assigned_twice_takes_part_once():
    coordinator = coordinate(0, 1, 2, 0)
    coordinator.receive(AssignNodes(TOKEN, (0, 0)))
    rounds = records(started(coordinator, 0), RoundFormed)
    assert {index: formed.round.world_size for index, formed in rounds.items()} == {0: 2}


# Nodes that must not be used again.

XID = "host1 is not used again: Xid 79, GPU 3 has fallen off the bus"


def broken(index: int, attempt: int = 0) -> WorkersEnded:
    return end(index, attempt, failed=True, cause=replace(exit_(index), hardware="Xid 79"), leaves=XID)


def verdicts(sent: list[Outgoing]) -> dict[int, RoundVerdict]:
    return records(sent, RoundVerdict)  # type: ignore[return-value]


def test_a_node_whose_hardware_failed_leaves_and_the_others_go_on_without_a_restart():
    coordinator = coordinate(0, 2, 3, 0)
    started(coordinator, 0, 1, 2)
    lost_peer = exit_(0, "RuntimeError: Connection closed by peer")
    told = verdicts(ended(coordinator, broken(1), end(0, 0, failed=True, cause=lost_peer), end(2, 0)))
    assert {index: verdict.attempt_follows for index, verdict in told.items()} == {0: True, 1: False, 2: True}
    assert told[1].decision == f"not restarted: {XID}; the other nodes go on"
    assert (told[0].node_leaves, told[0].restart_follows) == (XID, False)
    assert told[0].cause
    assert told[0].cause.hardware == "Xid 79", "not the peer that it took along"
    coordinator.receive(NodeLeft(1))
    coordinator.receive(join(0))
    coordinator.receive(join(2))
    assert coordinator.has_enough
    sent = coordinator.last_call_expired()
    assert sent == [Outgoing(0, ListenForWorkersStore(1, ""))]
    formed = records(coordinator.receive(WorkersStoreListens(0, 1, "10.0.0.1", 1)), RoundFormed)
    assert {index: record.round.restart_count for index, record in formed.items()} == {0: 0, 2: 0}


def test_a_spare_that_waits_takes_its_place_at_once():
    coordinator = coordinate(0, 2, 2, 0)
    started(coordinator, 0, 1)
    assert records(coordinator.receive(join(2)), NoFreePlace)
    assert verdicts(ended(coordinator, broken(1), end(0, 0)))[0].attempt_follows
    assert records(coordinator.receive(join(0)), ListenForWorkersStore)
    assert coordinator.participants == [0, 2]


def test_a_host_that_has_left_cannot_come_back():
    coordinator = coordinate(0, 1, 2, 0)
    started(coordinator, 0, 1)
    ended(coordinator, broken(1), end(0, 0))
    again = verdicts(coordinator.receive(NodeJoined(5, "host1", 2)))
    assert {index: verdict.reason for index, verdict in again.items()} == {5: "this run does not use host1 any more"}
    assert not coordinator.receive(join(0))
    assert coordinator.last_call_expired() == [Outgoing(0, ListenForWorkersStore(1, ""))]


def test_all_nodes_of_its_host_leave_with_it():
    """Where a scheduler starts a ddplaunch for every worker."""
    coordinator = coordinate(0, 1, 3, 0)
    for index, host in enumerate(("host0", "host1", "host1")):
        coordinator.receive(NodeJoined(index, host, 1))
    coordinator.receive(WorkersStoreListens(0, 0, "10.0.0.1", 1))
    told = verdicts(ended(coordinator, broken(1), end(0, 0), end(2, 0)))
    assert [told[index].attempt_follows for index in (0, 1, 2)] == [True, False, False]


def test_the_run_ends_if_too_few_nodes_are_left_and_says_which_one_is_broken():
    coordinator = coordinate(0, 2, 2, 5)
    started(coordinator, 0, 1)
    told = verdicts(ended(coordinator, broken(1), end(0, 0)))
    assert {(verdict.attempt_follows, verdict.outcome) for verdict in told.values()} == {(False, "failed")}
    assert told[0].decision == f"not restarted: {XID}; 1 other node is left, and 2 are needed"


def test_the_run_ends_with_the_node_that_serves_the_rendezvous():
    coordinator = coordinate(1, 1, 2, 5)
    started(coordinator, 0, 1)
    told = verdicts(ended(coordinator, broken(1), end(0, 0)))
    assert told[0].decision == f"not restarted: {XID}, and this node serves the rendezvous"
    assert not told[0].attempt_follows


def test_a_failure_elsewhere_that_came_by_itself_is_a_restart_and_the_node_leaves_all_the_same():
    coordinator = coordinate(0, 1, 3, 1)
    started(coordinator, 0, 1, 2)
    asks = end(1, 0, leaves=XID)
    told = verdicts(ended(coordinator, asks, end(0, 0), end(2, 0, failed=True, cause=exit_(2))))
    assert [told[index].attempt_follows for index in (0, 1, 2)] == [True, False, True]
    assert (told[0].decision, told[0].node_leaves) == ("restart 1 of 1", "")
    assert coordinator.restarts.count == 1


def test_a_fault_of_the_hardware_explains_the_failures_of_other_nodes():
    """A rank that waits for the broken one in a collective ends by a time limit of torch."""
    coordinator = coordinate(0, 1, 3, 0)
    started(coordinator, 0, 1, 2)
    late = end(0, 0, failed=True, cause=exit_(0, "RuntimeError: Watchdog caught collective timeout"))
    told = verdicts(ended(coordinator, late, broken(1), end(2, 0)))
    assert [told[index].attempt_follows for index in (0, 1, 2)] == [True, False, True]
    assert coordinator.restarts.count == 0


def test_a_wish_of_a_node_without_a_failure_changes_nothing():
    coordinator = coordinate(0, 1, 2, 1)
    started(coordinator, 0, 1)
    told = verdicts(ended(coordinator, end(1, 0, leaves=XID), end(0, 0)))
    assert told[0] == SUCCEEDED


def test_one_launcher_of_all_nodes_takes_the_node_out_before_a_round_is_formed():
    coordinator = with_launcher(5, 2)
    started(coordinator, 5, 2)
    hardware = replace(broken(2), node_leaves="host2 is not used again: Xid 79")
    told = verdicts(ended(coordinator, hardware, end(5, 0)))
    assert all(verdict.attempt_follows for verdict in told.values()), "the launcher decides"
    assert not coordinator.receive(join(5))
    assert not coordinator.receive(join(2)), "no round has the broken node"
    coordinator.receive(join(7))
    assert records(coordinator.receive(AssignNodes(TOKEN, (5, 7))), ListenForWorkersStore)


@pytest.mark.parametrize("spares", [0, 1])
def test_one_launcher_of_all_nodes_says_how_many_it_can_replace(spares: int):
    coordinator = coordinate(5, 2, 2, 0, (5, 2))
    started(coordinator, 5, 2)
    coordinator.receive(AssignNodes(TOKEN, (5, 2), spares=spares))
    hardware = replace(broken(2), node_leaves="host2 is not used again: Xid 79")
    told = verdicts(ended(coordinator, hardware, end(5, 0)))
    assert {verdict.attempt_follows for verdict in told.values()} == {bool(spares)}
    assert all("1 other node is left, and 2 are needed" in verdict.decision for verdict in told.values()) == (
        not spares
    )


# What scripts ask for.


def test_a_rank_that_gives_up_ends_the_run_whoever_has_failed_before_it():
    coordinator = coordinate(0, 2, 2, 5)
    started(coordinator, 0, 1)
    coordinator.receive(NodeStops(0, 0))
    asked = replace(exit_(2, "RuntimeError: Connection closed by peer"), host="host1", give_up="no data")
    ends = (end(0, 0, failed=True, cause=exit_(0)), end(1, 0, failed=True, cause=asked))
    verdict = records(ended(coordinator, *ends), RoundVerdict)[0]
    assert (verdict.attempt_follows, verdict.cause) == (False, asked)
    assert verdict.decision == "not restarted: rank 2 on host1 gave up: no data"


def test_a_rank_that_gives_up_ends_the_run_also_when_a_node_is_lost():
    coordinator = with_launcher(0, 1)
    coordinator.restarts.limit = 5
    started(coordinator, 0, 1)
    coordinator.receive(NodeLeft(1))
    asked = replace(exit_(0), give_up="no data")
    verdict = records(ended(coordinator, end(0, 0, failed=True, cause=asked)), RoundVerdict)[0]
    assert (verdict.attempt_follows, verdict.decision) == (False, "not restarted: rank 0 on host0 gave up: no data")


# Nodes that depart: the launcher of all nodes decides between two rounds.


def test_after_a_round_with_a_departing_node_the_launcher_names_the_nodes_of_the_next():
    coordinator = with_launcher(5, 2)
    coordinator.restarts.limit = 1
    started(coordinator, 5, 2)
    assert not coordinator.receive(AssignNodes(TOKEN, (5, 2), departing=(2,))), "the round goes on"
    ended(coordinator, end(5, 0, failed=True, cause=exit_(5)), end(2, 0))
    assert not coordinator.receive(join(5))
    assert not coordinator.receive(join(2)), "the launcher has not decided"
    assert records(coordinator.receive(AssignNodes(TOKEN, (5,))), ListenForWorkersStore)
    assert coordinator.participants == [5]


def test_a_departing_node_that_is_needed_after_all_stays():
    coordinator = with_launcher(5, 2)
    coordinator.restarts.limit = 1
    started(coordinator, 5, 2)
    coordinator.receive(AssignNodes(TOKEN, (5, 2), departing=(2,)))
    ended(coordinator, end(5, 0, failed=True, cause=exit_(5)), end(2, 0))
    coordinator.receive(join(5))
    coordinator.receive(join(2))
    assert records(coordinator.receive(AssignNodes(TOKEN, (5, 2))), ListenForWorkersStore)
    assert coordinator.participants == [5, 2]


def test_no_round_has_a_node_about_which_the_launcher_has_not_decided():
    coordinator = with_launcher(5, 2, 7)
    coordinator.restarts.limit = 1
    started(coordinator, 5, 2, 7)
    coordinator.receive(AssignNodes(TOKEN, (5, 2, 7), departing=(2,)))
    ended(coordinator, end(5, 0, failed=True, cause=exit_(5)), end(2, 0), end(7, 0))
    coordinator.receive(AssignNodes(TOKEN, (5, 2, 7), departing=(2, 7)))
    for index in (5, 2, 7):
        coordinator.receive(join(index))
    assert not coordinator.receive(AssignNodes(TOKEN, (5, 7), departing=(7,)))
    assert records(coordinator.receive(AssignNodes(TOKEN, (5, 7))), ListenForWorkersStore)


def test_a_rendezvous_that_moves_while_a_node_departs_waits_for_the_decision_too():
    coordinator = coordinate(5, 1, 9, 0, (5, 2), departing=(2,))
    for index in (5, 2):
        assert not coordinator.receive(join(index))
    assert records(coordinator.receive(AssignNodes(TOKEN, (5,))), ListenForWorkersStore)


# A node whose hardware is not sound takes no part.

SICK = "the hardware is not sound: host1: a row is lost"
OVER = RoundVerdict(0, "failed", reason=SICK, node_leaves=SICK)


def test_a_job_of_fixed_size_does_not_start_without_a_refused_node_and_all_are_told():
    coordinator = coordinate(0, 4, 4, 0)
    for index in (0, 2):
        coordinator.receive(join(index))
    assert coordinator.receive(NodeRefused(1, SICK)) == [Outgoing(0, OVER), Outgoing(2, OVER)]
    assert coordinator.receive(NodeLeft(2)) == [], "another one is still to come"
    assert coordinator.receive(join(3)) == [Outgoing(3, OVER)]
    assert coordinator.receive(NodeLeft(3)) == [Outgoing(0, AllNodesLeft())]


def test_the_node_that_serves_comes_after_the_refused_one():
    coordinator = coordinate(0, 2, 2, 0)
    assert coordinator.receive(NodeRefused(1, SICK)) == []
    assert coordinator.receive(join(0)) == [Outgoing(0, OVER), Outgoing(0, AllNodesLeft())]


def test_two_refused_nodes_are_not_waited_for():
    coordinator = coordinate(0, 3, 3, 0)
    coordinator.receive(join(0))
    assert coordinator.receive(NodeRefused(1, SICK)) == [Outgoing(0, OVER)]
    assert coordinator.receive(NodeRefused(2, "another")) == [Outgoing(0, AllNodesLeft())]


@pytest.mark.parametrize(("refused", "is_over"), [(1, False), (0, True)])
def test_an_elastic_job_needs_only_the_node_that_serves(refused: int, is_over: bool):
    coordinator = coordinate(0, 1, 3, 0)
    coordinator.receive(join(2))
    assert bool(coordinator.receive(NodeRefused(refused, SICK))) == is_over


def test_a_refused_node_that_is_not_needed_any_more_changes_nothing():
    coordinator = coordinate(0, 2, 2, 0)
    started(coordinator, 0, 1)
    assert coordinator.receive(NodeRefused(2, SICK)) == []
    assert records(coordinator.receive(NodeStops(1, 0)), StopRound)


# A node that SLURM takes out of service takes part only if it is needed.


def departing(index: int) -> NodeJoined:
    return replace(join(index), departs="SLURM drains it")


def failed_round(coordinator: Coordinator) -> None:
    """The first of its nodes fails; all may go on."""
    ended(coordinator, *(end(i, coordinator.attempt, failed=i == 0) for i in coordinator.participants))


def test_a_node_that_departs_is_left_at_the_next_round_and_told():
    coordinator = coordinate(0, 1, 2, 5)
    started(coordinator, 0, 1)
    failed_round(coordinator)
    assert coordinator.receive(departing(1)) == []
    sent = coordinator.receive(join(0))
    assert records(sent, NoFreePlace) == {1: NoFreePlace(("host0",))}
    assert coordinator.participants == [0]
    coordinator.receive(WorkersStoreListens(0, coordinator.attempt, "a", 1))
    failed_round(coordinator)
    assert records(coordinator.receive(join(0)), ListenForWorkersStore), "it still waits: nobody else is waited for"


def test_a_spare_takes_its_place_also_if_it_serves_the_rendezvous():
    coordinator = coordinate(0, 2, 2, 5)
    started(coordinator, 0, 1)
    assert records(coordinator.receive(join(2)), NoFreePlace)
    failed_round(coordinator)
    coordinator.receive(departing(0))
    coordinator.receive(join(1))
    assert coordinator.participants == [2, 1]


def test_it_takes_part_if_it_is_needed():
    coordinator = coordinate(0, 2, 2, 5)
    started(coordinator, 0, 1)
    failed_round(coordinator)
    coordinator.receive(departing(1))
    coordinator.receive(join(0))
    assert coordinator.participants == [0, 1]


def test_a_node_that_departs_does_not_stop_a_round_to_take_part():
    coordinator = coordinate(0, 1, 2, 5)
    coordinator.receive(join(0))
    coordinator.last_call_expired()
    coordinator.receive(WorkersStoreListens(0, 0, "a", 1))
    assert records(coordinator.receive(departing(1)), NoFreePlace)
    assert records(coordinator.receive(join(1)), StopRound), "SLURM uses it again"
