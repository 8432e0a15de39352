"""Which nodes take part: of those that connect, after a failure, when SLURM takes one out of service, and after a loss.

The agents are not real.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError, Level
from ddplaunch.features.hangs.records import WorkerActivity
from ddplaunch.features.node_progress.launcher import NodeProgress
from ddplaunch.features.slurm.launcher import NodeWatch
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.lost_nodes import LostNodes
from ddplaunch.launcher.nodes import Node, NodeState
from ddplaunch.launcher.participants import Participants
from ddplaunch.protocol.launcher_agent import (
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    NeedsRendezvous,
    NodeDeparts,
    NodeSilent,
    ReportOfNode,
)
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.wire import ProtocolError
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import ChannelClosed, NodeFacts
from tests.support import golden
from tests.support.configs import launch_config, rendezvous_config
from tests.support.fake_agents import brief, participants_of, unexplained
from tests.support.watches import ignore, run_services

XID = "Xid 79, GPU 3 has fallen off the bus"


def watch(config: LaunchConfig, participants: Participants, show: Callable[..., None] = ignore) -> NodeWatch:
    return NodeWatch(run_services(config, show=show, nodes=participants.nodes, participants=participants))


class Job:
    """A launcher of some nodes, ``least:most host ...``. Its methods are the steps of a story."""

    def __init__(self, nodes: str) -> None:
        counts, *hosts = nodes.split()
        least, most = map(int, counts.split(":"))
        self.said: list[str] = []
        show = lambda text, _level: self.said.append(text)  # noqa: E731
        self.attempts = Attempts(unexplained)
        self.participants = participants_of(
            (least, most), *hosts, rendezvous=rendezvous_config(), attempts=self.attempts, show=show
        )
        config = launch_config(script="x.py", hosts=tuple(map(Host, hosts)), min_nodes=least, max_nodes=most)
        self.watch = watch(config, self.participants, show)
        shutdown = SimpleNamespace(in_progress=False, has_killed=False, others_stop=False, fail=self._fail)
        note = lambda kind, text, node: self.said.append(f"event {kind} of node {node}: {text}")  # noqa: E731
        self.lost = LostNodes(config, self.participants, self.attempts, shutdown, note, show, list)  # type: ignore[arg-type]

    def _fail(self, error: LaunchError) -> None:
        self.said.append(f"error {error.exit_code}: {error.message}")

    def _node(self, host: str) -> Node:
        return next(node for node in self.participants.nodes.all if node.host == host)

    def _state(self) -> dict[str, list[str]]:
        """Of the nodes that take part, and of each node: the state, and what its agent was sent."""
        found = {"nodes": [" ".join(self.participants.nodes.all[index].host for index in self.participants.indices)]}
        for node in self.participants.nodes.all:
            handle: Any = node.handle
            flags = [flag for flag in ("killed", "ended") if getattr(handle, f"is_{flag}", False)]
            sent = [brief(record) for record in getattr(handle, "sent", ()) if record]  # A spare has no agent at first.
            found[node.host] = [" ".join([node.state.name, *flags]), *sent]
        return found

    def connect(self, *hosts: str) -> None:
        """Agents connect; ``b=2.12`` has this version of torch."""
        for host, _, torch in (each.partition("=") for each in hosts):
            self.participants.nodes.on_agent_connected(self._node(host), NodeFacts(torch=torch or "2.13"))
        self.participants.check_and_announce()

    def exclude(self, host: str, cause: str) -> None:
        self.lost.on_host_failure(self._node(host), HostFailure(host, cause, "no answer for 10 s"))
        self.said.append(f"losses: {self.participants.nodes.losses}")

    def _leave(self, host: str, *, attempt_follows: bool = True, **fields: str) -> None:
        exit_ = WorkerExit(1, 0, host, 1, -6, stopped=False, time_s=0.0, duration_s=1.0, **fields)  # type: ignore[arg-type]
        restarts = "avoid_node" in fields
        result = AttemptResult(0, "failed", (exit_,), 1.0, attempt_follows=attempt_follows, restart_follows=restarts)
        if restarts:
            self.attempts.on_ended(0, result, self.participants.indices)
        self.participants.leave_if_due(self._node(host), result)

    def fails(self, host: str, why: str = "") -> None:
        """A worker of the node fails: for a fault of the ``hardware``, or since ``avoid_node`` asks to leave it."""
        self._leave(host, **({why: XID} if why else {}))

    def ends(self, host: str, last: str = "") -> None:
        """The node ends its part of the attempt."""
        self._leave(host, attempt_follows=not last)

    def decided(self, host: str) -> None:
        """The last attempt has failed, by the report of this node."""
        index = self._node(host).index
        self.attempts.on_started(index, 0, self.participants.indices)
        self.attempts.on_ended(index, AttemptResult(0, "failed", (), 1.0), self.participants.indices)

    def starts(self, host: str, attempt: str = "0") -> None:
        index = self._node(host).index
        self.watch.on_event(index, AttemptStarted(int(attempt), 2, (1,), index, 2, index))

    def pauses(self, host: str) -> None:
        """The node is between two attempts."""
        over = AttemptEnded(AttemptResult(0, "failed", (), 1.0, attempt_follows=True))
        self.watch.on_event(self._node(host).index, over)

    def drained(self, *hosts: str) -> None:
        """SLURM answers that it drains these."""
        self.watch.on_answer(dict.fromkeys(hosts, "SLURM drains it"))

    def no_answer(self) -> None:
        self.watch.on_answer(None)

    def remaining(self, *without: str) -> None:
        self.said.append(str(self.participants.remaining_and_needed(map(self._node, without))))

    def suspend(self) -> None:
        self.participants.on_suspend()

    def without(self, host: str) -> None:
        self.participants.replace_or_shrink(self._node(host))

    def state(self, host: str, name: str) -> None:
        self._node(host).state = NodeState[name]

    def unresponsive(self, host: str) -> None:
        self.lost.on_unresponsive(self._node(host))

    def closes(self, host: str, returncode: str) -> None:
        self.lost.on_channel_closed(self._node(host), int(returncode))

    def silent(self, reporter: str, token: str, index: str) -> None:
        self.lost.on_node_silent(self._node(reporter), NodeSilent(f"job7#{token}", int(index), 5.0))

    def opens(self, host: str, token: str = "") -> None:
        """The node says that the rendezvous is open there: this one, or the present one."""
        token = f"job7#{token}" if token else self.participants.token
        self.participants.on_endpoint_open(self._node(host), EndpointOpen(token, ("10.0.0.1", "10.1.0.1"), 4321))

    def formed(self, attempt: str) -> None:
        self.participants.on_round_formed(int(attempt))

    def misses(self, host: str, token: str = "") -> None:
        """The node has lost this rendezvous, or the present one."""
        token = f"job7#{token}" if token else self.participants.token
        self.lost.on_needs_rendezvous(self._node(host), NeedsRendezvous(token, "no route"))

    def ready(self, host: str, workers: str) -> None:
        """What its agent says; the workers of all nodes once all are."""
        node = self._node(host)
        node.workers = int(workers)
        self.said.append(f"all are ready: {self.participants.on_agent_ready(node)}")

    # Sweeps.

    def no_sweep(self) -> None:
        """Nodes cannot be swept."""
        self.participants.nodes._transport.sweep = lambda index, _on_event: None

    def sweep(self, host: str) -> None:
        self.participants.nodes.sweep(self._node(host))

    def swept(self, host: str) -> None:
        self.participants.nodes.on_sweep_event(self._node(host), ChannelClosed())

    def time_over(self) -> None:
        """That of the first sweep."""
        nodes = self.participants.nodes
        nodes.run_due(nodes.run_due(0.0))

    def over(self) -> None:
        """Whether the run is, and whose sweep has the next deadline."""
        nodes = self.participants.nodes
        due = nodes.run_due(0.0)
        next_ = [node.host for node in nodes.all if node.sweep_deadline == due < float("inf")]
        self.said.append(f"over: {nodes.all_finished}, a sweep goes on: {nodes.any_sweeping}, due: {next_}")


def played(job: Job, step: str) -> str:
    """The step, what is said, and what has changed."""
    before = job._state()

    try:
        text = golden.play(job, step)
    except LaunchError as error:
        job._fail(error)
        text = "\n    ".join([step, *job.said])
    lines = [text]
    for name, now in job._state().items():
        (old_state, *old_sent), (state, *sent) = before.get(name, [""]), now
        lines += [f"    {name}: {state}"] * (state not in (old_state, "RUNNING"))
        lines += [f"    {name} <- {record}" for record in sent[len(old_sent) :]]
    return "\n".join(lines)


def test_which_nodes_take_part() -> None:
    """A story is the nodes and the steps."""

    def story(text: str) -> str:
        _, nodes, steps = text.split(": ")
        job = Job(nodes)
        return "\n".join(played(job, step) for step in steps.split(", "))

    golden.check_pages("nodes", story)


def test_a_job_that_needs_a_lost_node_is_stopped_before_its_nodes_hear_of_the_loss() -> None:
    """They could begin an attempt without it, before the order to stop comes."""
    job = Job("2:2 a b")
    job.connect("a", "b")
    job.opens("a")
    handle: Any = job._node("a").handle
    seen: list[list[str]] = []
    job.lost._shutdown.fail = lambda error: seen.append([*map(brief, handle.sent), error.message])
    job.closes("b", "-9")
    ((*sent, error),) = seen
    assert error == "the agent on b was killed by SIGKILL; no further attempt: 1 node is left, and 2 are needed"
    assert [brief(record) for record in handle.sent][: len(sent)] == sent
    assert len(handle.sent) == len(sent) + 1, "AssignNodes without b"


# Sweeps.


def test_the_user_is_told_once_that_only_a_sweep_keeps_the_run_from_its_end():
    participants = Job("2:2 a b").participants
    said: list[str] = []
    messages: Any = SimpleNamespace(progress=None, show=lambda text, _level: said.append(text))
    for node in participants.nodes.all:
        participants.nodes.on_agent_connected(node)
    notice = NodeProgress(participants, messages)
    assert notice.run_due(0.0) == float("inf")
    participants.nodes.sweep(participants.nodes.all[1])
    assert [notice.run_due(now) for now in (10.0, 10.1, 13.0)] == [10.5, 10.5, 13.5], "the other agent still runs"
    participants.nodes.all[0].state = NodeState.DONE
    assert [notice.run_due(now) for now in (13.5, 14.0, 15.4)] == [14.0, 14.5, 15.9]
    assert not said
    assert notice.run_due(15.9) == notice.run_due(60.0) == float("inf")
    assert said == ["processes of this run are looked for on b, for up to 20 s"]


# Nodes with a launcher each.


@pytest.fixture
def own_watch(monkeypatch: pytest.MonkeyPatch) -> NodeWatch:
    """The watch of a launcher that has one node, and meets the others at an endpoint."""
    monkeypatch.setenv("SLURMD_NODENAME", "node02")
    job = Job("1:1 node02.example.com")
    job.connect("node02.example.com")
    config = launch_config(script="x.py", rendezvous=rendezvous_config())
    return watch(config, job.participants)


def test_where_each_node_has_a_launcher_its_agent_is_told_of_a_change(own_watch: NodeWatch):
    participants = own_watch._participants
    maintained = {"node01": "its maintenance begins"}
    for leaving in (maintained, {"node02": "SLURM drains it", **maintained}, {"node02": "SLURM drains it"}, {}, {}):
        own_watch.on_answer(leaving)
    told = [sent for sent in participants.nodes.all[0].handle.sent if isinstance(sent, NodeDeparts)]  # type: ignore[attr-defined]
    assert told == [NodeDeparts("SLURM drains it"), NodeDeparts("")]


def test_launchers_of_one_node_each_take_turns_and_ask_less_often_in_large_jobs(
    own_watch: NodeWatch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_NTASKS", "1000")
    monkeypatch.setenv("SLURM_PROCID", "999")
    large = watch(launch_config(script="x.py", rendezvous=rendezvous_config()), own_watch._participants)
    assert (large._first_s, large._period_s) == (199.8, 200.0)
    assert (own_watch._first_s, own_watch._period_s) == (0.0, 60.0)


def test_the_first_report_of_another_node_that_the_launcher_cannot_handle_is_shown_and_the_run_goes_on() -> None:
    shown: list[tuple[str, int]] = []
    job = Job("2:2 a b")
    job.lost._show = lambda text, level: shown.append((text, level))
    for error in (ProtocolError("too long"), IndexError("tuple index out of range"), IndexError("again")):
        job.lost.on_bad_record(job._node("a"), ReportOfNode(1, (0, 1), WorkerActivity(0)), error)
    ignored = "a report of node 1 is ignored: its WorkerActivity"
    assert shown == [
        (f"{ignored} is invalid: too long", Level.VERBOSE),
        (f"{ignored} cannot be handled: IndexError: tuple index out of range", Level.NORMAL),
        (f"{ignored} cannot be handled: IndexError: again", Level.VERBOSE),
    ]


def test_an_error_while_a_loss_is_handled_begins_no_second_sweep_and_the_node_takes_part_no_longer() -> None:
    job = Job("1:1 a")
    job.lost._config = launch_config(script="x.py", dry_run=True)
    job.lost._shutdown.on_bug = lambda told: setattr(job.lost._shutdown, "others_stop", bool(told))  # type: ignore[method-assign]
    node, note = job._node("a"), job.lost._note
    job.lost._note = lambda *_, **_named: 1 / 0
    with pytest.raises(ZeroDivisionError):
        job.closes("a", "-9")
    sweeper, job.lost._note = node.sweeper, note
    job.lost.on_bad_record(node, ChannelClosed(), ZeroDivisionError("division by zero"))
    assert node.sweeper is sweeper is not None
    assert job.participants.indices == []
