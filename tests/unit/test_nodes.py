"""Which nodes take part once all have told what they have; another version of torch cannot be installed twice here."""

from __future__ import annotations

import pytest

from ddplaunch.errors import HARDWARE, LaunchError
from ddplaunch.features.slurm_nodes.launcher import SlurmAnswered, SlurmWatch
from ddplaunch.launcher import departure
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.nodes import NodeState
from ddplaunch.launcher.participants import Participants
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, JoinRendezvous, StopWorkers
from ddplaunch.protocol.results import AssignNodes, AttemptResult, NodeDeparts, WorkerExit
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import ChannelClosed
from ddplaunch.transport.remote_start import NodeFacts
from tests.support.configs import launch_config, rendezvous_config
from tests.support.fake_agents import participants_of, unexplained


def connected(participants: Participants, *versions: str) -> None:
    for node, torch in zip(participants.nodes.all, versions, strict=True):
        participants.nodes.on_agent_connected(node, NodeFacts(torch=torch))
    participants.on_changed()


def started(min_nodes: int, max_nodes: int, *hosts: str) -> tuple[Participants, list[str]]:
    said: list[str] = []
    return participants_of((min_nodes, max_nodes), *hosts, show=lambda text, _level: said.append(text)), said


def test_nodes_with_one_torch_all_take_part():
    participants, _ = started(3, 3, "a", "b", "c")
    connected(participants, "2.13", "2.13", "2.13")
    assert participants.indices == [0, 1, 2]


def test_a_node_with_another_torch_is_left_out_and_said():
    participants, said = started(2, 3, "a", "b", "c")
    connected(participants, "2.13", "2.12", "2.13")
    assert participants.indices == [0, 2]
    assert participants.nodes.all[1].handle.is_ended
    assert said == ["b cannot be used: torch 2.12, and 2.13 on most hosts; the job runs without it"]


def test_a_spare_takes_its_place():
    participants, said = started(2, 2, "a", "b", "c")
    connected(participants, "2.13", "2.12")
    participants.nodes.on_agent_connected(participants.nodes.all[2], NodeFacts(torch="2.13"))
    participants.on_changed()
    assert participants.indices == [0, 2]
    assert "c replaces b" in said


def test_a_host_that_is_not_reached_is_remembered_and_one_without_torch_is_not():
    participants, _ = started(1, 3, "a", "b", "c")
    participants.exclude(participants.nodes.all[1], HostFailure("b", "timeout", "no answer for 10 s"))
    participants.exclude(participants.nodes.all[2], HostFailure("c", "torch", "no torch"))
    assert participants.nodes.losses == {"b": "b could not be reached: no answer for 10 s"}


def test_without_enough_others_all_are_told_in_one_table():
    participants, _ = started(3, 3, "a", "b", "c")
    with pytest.raises(LaunchError, match=r"not enough hosts can be used\n  b: torch 2\.12, and 2\.13 on most hosts"):
        connected(participants, "2.13", "2.12", "2.13")


def test_the_run_is_over_when_all_nodes_are_whatever_their_order():
    participants, _ = started(3, 3, "a", "b", "c")
    connected(participants, "2.13", "2.13", "2.13")
    participants.nodes.sweep(participants.nodes.all[1])
    for node in (participants.nodes.all[2], participants.nodes.all[0]):
        assert not participants.nodes.all_finished
        node.state = NodeState.DONE
    assert not participants.nodes.all_finished, "a sweep goes on"
    participants.nodes.on_sweep_event(participants.nodes.all[1], ChannelClosed())
    assert participants.nodes.all_finished


def test_a_sweep_is_given_up_when_its_time_is_over():
    participants, _ = started(2, 2, "a", "b")
    assert participants.nodes.run_due(0.0) == float("inf")
    participants.nodes.sweep(participants.nodes.all[1])
    deadline = participants.nodes.run_due(0.0)
    assert deadline == participants.nodes.all[1].sweep_deadline
    assert participants.nodes.all[1].state is NodeState.SWEEPING
    assert participants.nodes.run_due(deadline) == float("inf")
    assert participants.nodes.all[1].state is NodeState.LOST


def test_a_node_that_cannot_be_swept_is_lost_at_once():
    participants, _ = started(2, 2, "a", "b")
    participants.nodes._transport.sweep = lambda index: None
    participants.nodes.sweep(participants.nodes.all[0])
    assert participants.nodes.all[0].state is NodeState.LOST


# Nodes that must not be used again.

XID = "Xid 79, GPU 3 has fallen off the bus"


def after_failure(min_nodes: int, *hosts: str, hardware: str = XID) -> tuple[Participants, list[str]]:
    """A run of two nodes, with spares if there are more ``hosts``, after a failure on the second of them."""
    said: list[str] = []
    show = lambda text, _level: said.append(text)  # noqa: E731
    participants = participants_of((min_nodes, 2), *hosts, rendezvous=rendezvous_config(), show=show)
    connected(participants, "2.13", "2.13")
    exit_ = WorkerExit(1, 0, "b", 1, -6, stopped=False, time_s=0.0, duration_s=1.0, hardware=hardware)
    result = AttemptResult(0, "failed", (exit_,), 1.0, attempt_follows=True)
    departure.leave(participants.nodes.all[1], result, participants, show)
    return participants, said


def test_a_spare_replaces_a_node_whose_hardware_failed_and_its_agent_ends_in_order():
    participants, said = after_failure(2, "a", "b", "c")
    assert participants.indices == [0, 2]
    assert isinstance(participants.nodes.all[1].handle.sent[-1], StopWorkers)
    assert participants.nodes.all[1].state is NodeState.RUNNING, "its logs are still to come"
    assert said == [f"b is not used again: {XID}", "c replaces b"]


def test_without_a_spare_the_world_gets_smaller():
    participants, _ = after_failure(1, "a", "b")
    assert participants.indices == [0]


def test_the_run_ends_if_too_few_nodes_are_left_of_which_the_coordinator_did_not_know():
    with pytest.raises(LaunchError) as caught:
        after_failure(2, "a", "b")
    reason = f"not restarted: b is not used again: {XID}; 1 other node is left, and 2 are needed"
    assert (caught.value.message, caught.value.exit_code) == (reason, HARDWARE)


def test_a_restart_is_counted_where_the_node_that_leaves_serves_the_rendezvous():
    """Another node has failed by itself in the same attempt: the next rendezvous begins with one restart."""
    attempts = Attempts(unexplained)
    participants = participants_of((2, 2), "a", "b", "c", rendezvous=rendezvous_config(), attempts=attempts)
    connected(participants, "2.13", "2.13")
    exit_ = WorkerExit(0, 0, "a", 1, 88, stopped=False, time_s=0.0, duration_s=1.0, avoid_node="it is slow")
    result = AttemptResult(0, "failed", (exit_,), 1.0, attempt_follows=True, restart_follows=True)
    attempts.on_ended(0, result, participants.indices)
    departure.leave(participants.nodes.all[0], result, participants, participants._show)
    participants.nodes.on_agent_connected(participants.nodes.all[2], NodeFacts(torch="2.13"))
    participants.on_changed()
    (asked,) = (sent.rendezvous for sent in participants.nodes.all[2].handle.sent if isinstance(sent, JoinRendezvous))
    assert (asked.is_server, asked.attempt, asked.restarts_so_far) == (True, 1, 1)


def test_a_node_with_another_failure_stays():
    participants, said = after_failure(1, "a", "b", hardware="")
    assert (participants.indices, said) == ([0, 1], [])


# Nodes that the scheduler takes out of service.


def departing(min_nodes: int, *hosts: str, leaving: dict[str, str]) -> tuple[Participants, list[str], SlurmWatch]:
    """A run of two nodes of which SLURM has told this, before its first attempt ends."""
    said: list[str] = []
    show = lambda text, _level: said.append(text)  # noqa: E731
    participants = participants_of((min_nodes, 2), *hosts, rendezvous=rendezvous_config(), show=show)
    connected(participants, "2.13", "2.13")
    watch = SlurmWatch(launch_config(script="x.py"), participants, lambda _: None, show)
    for index in (0, 1):
        watch.on_event(index, participants.indices, AttemptStarted(0, 2, (1,), index, 2, index))
    watch.on_answer(SlurmAnswered(leaving))
    return participants, said, watch


def ends(participants: Participants, index: int, *, follows: bool = True) -> None:
    result = AttemptResult(0, "failed", (), 1.0, attempt_follows=follows)
    departure.leave(participants.nodes.all[index], result, participants, participants._show)


def told_coordinator(participants: Participants) -> AssignNodes:
    return next(sent for sent in reversed(participants.nodes.all[0].handle.sent) if isinstance(sent, AssignNodes))  # type: ignore[attr-defined]


TOKEN = "job7#1"
DRAINED = {"b": "SLURM drains it: bad disk"}


def test_a_node_that_slurm_drains_is_replaced_after_the_attempt():
    participants, said, _ = departing(2, "a", "b", "c", leaving=DRAINED)
    assert said == ["b: SLURM drains it: bad disk; it is left after this attempt"]
    assert told_coordinator(participants) == AssignNodes(TOKEN, (0, 1), (1,), spares=1)
    ends(participants, 0)
    assert participants.indices == [0, 1]
    ends(participants, 1)
    assert said[1:] == ["b is left: SLURM drains it: bad disk", "c replaces b"]
    assert told_coordinator(participants) == AssignNodes(TOKEN, (0, 2))
    assert isinstance(participants.nodes.all[1].handle.sent[-1], StopWorkers)


def test_it_is_used_further_where_no_other_node_can_replace_it():
    participants, said, watch = departing(2, "a", "b", leaving=DRAINED)
    assert said == ["b: SLURM drains it: bad disk; no other node can replace it"]
    assert told_coordinator(participants) == AssignNodes(TOKEN, (0, 1))
    watch.on_answer(SlurmAnswered(DRAINED))
    ends(participants, 1)
    assert (participants.indices, len(said)) == ([0, 1], 1)


def test_it_stays_if_the_spare_was_needed_meanwhile():
    participants, said, _ = departing(2, "a", "b", "c", leaving=DRAINED)
    participants.continue_without(participants.nodes.all[0])
    participants.nodes.on_agent_connected(participants.nodes.all[2], NodeFacts(torch="2.13"))
    participants.on_changed()
    ends(participants, 1)
    assert participants.indices == [2, 1]
    assert not participants.rendezvous or not participants.rendezvous.departing
    assert "b is left" not in said


def test_of_two_only_as_many_leave_as_are_not_needed():
    participants, said, _ = departing(1, "a", "b", leaving={"a": "SLURM drains it", **DRAINED})
    assert told_coordinator(participants) == AssignNodes(TOKEN, (0, 1), (0,))
    assert [text.endswith("after this attempt") for text in said] == [True, False]


def test_a_node_that_slurm_gives_back_stays_and_an_answer_that_is_late_changes_nothing():
    participants, _, watch = departing(2, "a", "b", "c", leaving=DRAINED)
    watch.on_answer(SlurmAnswered(None))
    assert told_coordinator(participants).departing == (1,)
    watch.on_answer(SlurmAnswered({}))
    assert told_coordinator(participants).departing == ()
    ends(participants, 1)
    assert participants.indices == [0, 1]


def test_a_node_between_two_attempts_departs_after_the_next_one():
    participants, said, watch = departing(2, "a", "b", "c", leaving={})
    watch.on_event(1, participants.indices, AttemptEnded(AttemptResult(0, "failed", (), 1.0, attempt_follows=True)))
    watch.on_answer(SlurmAnswered(DRAINED))
    assert not said
    assert told_coordinator(participants).departing == ()
    watch.on_event(1, participants.indices, AttemptStarted(1, 2, (1,), 1, 2, 1))
    watch.on_answer(SlurmAnswered(DRAINED))
    assert told_coordinator(participants).departing == (1,)


def test_no_attempt_waits_for_a_launcher_that_is_suspended():
    participants, _, watch = departing(2, "a", "b", "c", leaving=DRAINED)
    departure.on_suspend(participants)
    assert told_coordinator(participants).departing == ()
    ends(participants, 1)
    assert participants.indices == [0, 1]
    watch.on_answer(SlurmAnswered(DRAINED))
    assert told_coordinator(participants).departing == (1,)


def test_nothing_leaves_after_the_last_attempt():
    participants, _, _ = departing(2, "a", "b", "c", leaving=DRAINED)
    ends(participants, 1, follows=False)
    assert participants.indices == [0, 1]


def test_a_spare_that_slurm_drains_is_not_chosen():
    participants, said, watch = departing(2, "a", "b", "c", "d", leaving={"c": "SLURM drains it", **DRAINED})
    assert participants.remaining_without() == (3, 2)
    ends(participants, 1)
    assert participants.indices == [0, 3]
    assert (participants.nodes.all[2].host, participants.nodes.all[2].state) == ("c", NodeState.DONE)
    assert said[-2:] == ["c is not chosen: SLURM takes it out of service", "d replaces b"]
    watch.on_answer(SlurmAnswered({}))
    assert participants.remaining_without() == (2, 2), "b and c are not used again"


def test_a_spare_that_slurm_gives_back_may_be_chosen():
    participants, _, watch = departing(2, "a", "b", "c", leaving={"c": "SLURM drains it"})
    assert participants.remaining_without(participants.nodes.all[0]) == (1, 2)
    watch.on_answer(SlurmAnswered({}))
    participants.continue_without(participants.nodes.all[0])
    assert participants.indices == [2, 1]


@pytest.fixture
def own_watch(monkeypatch: pytest.MonkeyPatch) -> SlurmWatch:
    """The watch of a launcher that has one node, and meets the others at an endpoint."""
    monkeypatch.setenv("SLURMD_NODENAME", "node02")
    participants, _ = started(1, 1, "node02.example.com")
    connected(participants, "2.13")
    return SlurmWatch(
        launch_config(script="x.py", rendezvous=rendezvous_config()), participants, lambda _: None, participants._show
    )


def test_where_each_node_has_a_launcher_its_agent_is_told_of_a_change(own_watch: SlurmWatch):
    participants = own_watch._participants
    maintained = {"node01": "its maintenance begins"}
    for leaving in (maintained, {"node02": "SLURM drains it", **maintained}, {"node02": "SLURM drains it"}, {}, {}):
        own_watch.on_answer(SlurmAnswered(leaving))
    told = [sent for sent in participants.nodes.all[0].handle.sent if isinstance(sent, NodeDeparts)]  # type: ignore[attr-defined]
    assert told == [NodeDeparts("SLURM drains it"), NodeDeparts("")]


def test_launchers_of_one_node_each_take_turns_and_ask_less_often_in_large_jobs(
    own_watch: SlurmWatch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_NTASKS", "1000")
    monkeypatch.setenv("SLURM_PROCID", "999")
    large = SlurmWatch(
        launch_config(script="x.py", rendezvous=rendezvous_config()),
        own_watch._participants,
        lambda _: None,
        lambda *_: None,
    )
    assert (large._first_s, large._period_s) == (199.8, 200.0)
    assert (own_watch._first_s, own_watch._period_s) == (0.0, 60.0)
