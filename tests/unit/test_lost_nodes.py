"""What the launcher does when a node is lost; the agents are not real."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddplaunch.errors import NODE_LOST, LaunchError
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.lost_nodes import LostNodes
from ddplaunch.launcher.nodes import NodeState
from ddplaunch.protocol.launcher_agent import JoinRendezvous
from ddplaunch.protocol.results import AssignNodes, NeedsRendezvous, NodeSilent
from tests.support.configs import rendezvous_config
from tests.support.fake_agents import participants_of, unexplained


class Job:
    """A run of nodes whose agents are connected."""

    def __init__(self, nnodes: tuple[int, int], *hosts: str) -> None:
        self.said: list[str] = []
        self.errors: list[LaunchError] = []
        self.events: list[tuple[object, ...]] = []
        show = lambda text, _level: self.said.append(text)  # noqa: E731
        self.participants = participants_of(nnodes, *hosts, rendezvous=rendezvous_config(), show=show)
        self.nodes = self.participants.nodes.all
        for node in self.nodes:
            self.participants.nodes.on_agent_connected(node)
        self.participants.on_changed()
        shutdown = SimpleNamespace(in_progress=False, has_killed=False, node_ended=False, fail=self.errors.append)
        events = SimpleNamespace(of_node=lambda *event: self.events.append(event))
        self.lost = LostNodes(5.0, self.participants, Attempts(unexplained), shutdown, events, show, list)  # type: ignore[arg-type]

    def told(self, index: int) -> object:
        """The last record that the agent of this node was sent."""
        return self.nodes[index].handle.sent[-1]  # type: ignore[attr-defined]


def test_without_a_spare_the_world_shrinks_and_the_node_that_serves_is_told() -> None:
    job = Job((2, 3), "a", "b", "c")
    job.lost.on_unresponsive(job.nodes[1])
    assert job.said == ["b has not answered for 5 s; the job goes on"]
    assert (job.participants.indices, job.nodes[1].state) == ([0, 2], NodeState.SWEEPING)
    assert job.told(0) == AssignNodes("job7#1", (0, 2))
    assert job.events == [("node_lost", 1, "b has not answered for 5 s")]


def test_another_node_serves_if_that_is_lost_which_did() -> None:
    job = Job((2, 3), "a", "b", "c")
    job.lost.on_unresponsive(job.nodes[0])
    asked = job.told(1)
    assert isinstance(asked, JoinRendezvous)
    assert (asked.rendezvous.token, asked.rendezvous.is_server) == ("job7#2", True)


def test_without_enough_nodes_the_run_ends() -> None:
    job = Job((2, 2), "a", "b")
    job.lost.on_channel_closed(job.nodes[1], -9)
    (error,) = job.errors
    assert (error.message, error.exit_code) == ("the agent on b was killed by SIGKILL", NODE_LOST)


def test_a_node_that_only_sends_its_logs_is_not_lost() -> None:
    job = Job((2, 3), "a", "b", "c")
    job.nodes[1].state = NodeState.SENDING_LOGS
    job.lost.on_unresponsive(job.nodes[1])
    assert (job.said, job.participants.indices) == ([], [0, 1, 2])
    assert job.nodes[1].handle.is_killed  # type: ignore[attr-defined]


def test_a_silent_node_is_named_and_not_the_one_that_reports_it_and_one_that_was_removed_is_not_missed() -> None:
    job = Job((1, 3), "a", "b", "c")
    job.lost.on_node_silent(job.nodes[0], NodeSilent("job7#1", 2, 5.0))
    assert job.said == ["c has lost the rendezvous on a (it sent no heartbeat for 5 s); the nodes start a new one"]
    job.participants.continue_without(job.nodes[2])
    for silent in (2, 99):
        job.lost.on_node_silent(job.nodes[0], NodeSilent("job7#2", silent, 5.0))
    assert len(job.said) == 1
    assert job.told(0) == AssignNodes("job7#2", (0, 1)), "of the rendezvous that goes on"


@pytest.mark.parametrize("index", [1, 2])
def test_only_the_node_that_serves_says_that_another_is_silent(index: int) -> None:
    job = Job((1, 3), "a", "b", "c")
    job.lost.on_node_silent(job.nodes[index], NodeSilent("job7#1", 0, 5.0))
    assert job.said == []


def test_a_node_that_has_lost_the_present_rendezvous_is_named() -> None:
    job = Job((1, 3), "a", "b", "c")
    for token in ("job7#0", "job7#1", "job7#1"):
        job.lost.on_needs_rendezvous(job.nodes[1], NeedsRendezvous(token, "its member has ended"))
    assert job.said == ["b has lost the rendezvous on a (its member has ended); the nodes start a new one"]


def test_the_node_that_serves_may_lose_its_own_rendezvous_a_few_times() -> None:
    job = Job((1, 2), "a", "b")
    for number in range(1, 5):
        job.lost.on_needs_rendezvous(job.nodes[0], NeedsRendezvous(f"job7#{number}", "its member has ended"))
    assert set(job.said) == {"a has lost the rendezvous (its member has ended); the nodes start a new one"}
    with pytest.raises(LaunchError, match=r"^b cannot join the rendezvous on a: no route$"):
        job.lost.on_needs_rendezvous(job.nodes[1], NeedsRendezvous("job7#5", "no route"))
