"""A node on another machine that says anything: the launcher goes on without it, and writes only its own files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddplaunch import features
from ddplaunch.cluster.hosts import Host
from ddplaunch.errors import INTERNAL, LaunchError
from ddplaunch.features.collect_logs import records as collect_logs
from ddplaunch.features.faults.records import FaultInjected
from ddplaunch.features.hangs.launcher import HangWatch
from ddplaunch.features.node_progress.launcher import NodeProgress
from ddplaunch.features.usage import records as usage
from ddplaunch.launcher import pings, setup
from ddplaunch.launcher.display.console import Console
from ddplaunch.launcher.nodes import Node
from ddplaunch.launcher.record_checks import RecordChecks
from ddplaunch.launcher.run import Run
from ddplaunch.launcher.shutdown import Shutdown
from ddplaunch.launcher.watches import Watches
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import (
    FROM_OWN_AGENT,
    AgentEnded,
    AgentFailed,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    FirstRoundFormed,
    JoinRendezvous,
    NodeDetails,
    Output,
    Ping,
    Pong,
    StopWorkers,
)
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.system.files import run_folder
from ddplaunch.system.signals import SignalReceived
from tests.support.configs import launch_config, rendezvous_config
from tests.support.fake_agents import participants_of
from tests.support.spoken_agents import Answer, Mutator, SpokenHandle, SpokenTransport, honest

HOSTS = ("node0", "node1")
RARE = (
    *(*usage.FROM_AGENT, *collect_logs.FROM_AGENT, *features.records("FROM_AGENT")),
    *features.records("FROM_AGENT", "queries"),
)


class Session:
    """A run of two nodes, of which ``bad`` says ``said`` in parts: when it starts, when it joins, and later.

    The other one succeeds once all is said.
    """

    def __init__(self, tmp_path: Path, bad: int, said: list[bytes]) -> None:
        self.bad = bad
        self.agent: SpokenHandle | None = None
        self._parts = iter(said)
        hosts = tuple(map(Host, HOSTS))
        self.config = launch_config(
            script="x.py", hosts=hosts, min_nodes=1, max_nodes=2, collect_logs=True, log_dir=str(tmp_path / "runs")
        )
        self.folder = run_folder.create(tmp_path / "runs", "r1")
        self.shown = tmp_path / "shown"

    def answers(self) -> list[Answer]:
        answers = [honest(index, HOSTS[index], (1 - index,), self._is_over) for index in range(2)]
        answers[self.bad] = self._speak
        return answers

    def _is_over(self) -> bool:
        """Whether the bad node has said everything: then the other one comes to its end."""
        return self.agent is not None and self.agent.is_closed

    def _speak(self, agent: SpokenHandle, record: object) -> None:
        self.agent = agent
        if isinstance(record, Ping):
            agent.say(Pong())
        if isinstance(record, StopWorkers):
            agent.end()
        if isinstance(record, (AgentSpec, JoinRendezvous, Ping)):
            part = next(self._parts, None)
            if part is None:
                agent.end()
            else:
                agent.hear(part)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> tuple[RunResult | None, LaunchError | None]:
        monkeypatch.setattr(pings, "INTERVAL_S", 0.02)
        started: list[SpokenTransport] = []

        def transport_for(config: Any, _tag: str, output: Any, post: Any, *_: object) -> SpokenTransport:
            started.append(SpokenTransport(config, HOSTS, output, post, self.answers()))
            return started[0]

        monkeypatch.setattr(setup, "transport_for", transport_for)
        fd = os.open(self.shown, os.O_WRONLY | os.O_CREAT)
        with contextlib.closing(Console(setup.console_style(self.config, None), fd, fd)) as console:
            console.keep_log(self.folder, reports_full_disk=False)
            run = Run(self.config, "r1", "r1", None, Mailbox(), self.folder, console)
            with run_folder.released(self.folder):
                try:
                    return run.run(), None
                except LaunchError as error:
                    return None, error
                finally:
                    console.close()
                    os.close(fd)

    def goes_on(self, monkeypatch: pytest.MonkeyPatch) -> RunResult:
        """The result of a run that the bad node has not disturbed."""
        result, error = self.run(monkeypatch)
        assert error is None
        assert result
        assert result.exit_code == 0
        return result


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the launcher's memory of nodes, and a working directory that is none of its business."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "others").mkdir()
    monkeypatch.chdir(tmp_path / "others")
    return tmp_path


def files_besides(root: Path) -> list[str]:
    """What is in ``root`` that a run must not write."""
    own = ("runs/r1/", "state/ddplaunch/nodes.json", "state/ddplaunch/.nodes.lock", "shown")
    paths = (str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
    return [path for path in paths if not path.startswith(own)]


def shown(session: Session) -> str:
    return session.shown.read_text()


def started(bad: int) -> bytes:
    return wire.encode(AttemptStarted(0, 2, (11,), bad, 2, bad))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_node_says_the_launcher_survives(seed: int, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutator = Mutator(seed, share=(0.0, 0.02, 0.1)[seed % 3])
    kinds = [kind for kind in (*FROM_OWN_AGENT, *RARE) if kind is not AgentFailed]  # That names an exit code.
    bad = seed % 2
    # Usually it begins as it should, since little happens to a node that has not.
    begin = [wire.encode(AgentReady(1)) if seed % 4 else b"", started(bad) if seed % 5 else b"", b"", b""]
    rest = [[mutator.line(mutator.random.choice(kinds)) for _ in range(mutator.random.randrange(6))] for _ in begin]
    session = Session(state, bad, [first + b"".join(more) for first, more in zip(begin, rest, strict=True)])
    result, error = session.run(monkeypatch)
    assert (error.exit_code if error else result and result.exit_code) != INTERNAL, error
    assert files_besides(state) == []
    assert (session.folder / "report.json").exists()


@pytest.mark.parametrize("names", [("..", "..", "others"), ("others", "x"), ("x" * 5000,)])
def test_a_node_does_not_choose_the_run_folder(
    names: tuple[str, ...], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(state, 1, [wire.encode(AgentReady(1)), wire.encode(FirstRoundFormed(names))])
    assert session.goes_on(monkeypatch).run_dir == str(session.folder)
    assert "ddplaunch: the agent on node1 sent an invalid record and was given up: not a record: " in shown(session)
    assert "ddplaunch: the connection to node1 has ended; the job can go on without it\n" in shown(session)
    assert files_besides(state) == []


def test_a_fault_that_nobody_asked_for_is_none(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [AgentReady(1), FaultInjected(5), FaultInjected(0)]
    session = Session(state, 1, [b"".join(map(wire.encode, said))])
    session.goes_on(monkeypatch)
    assert "given up" not in shown(session)
    assert "the connection to node1 has ended; the job can go on without it" in shown(session)


EXIT = WorkerExit(1, 0, "node1", 12, 1, stopped=False, time_s=1.0, duration_s=1.0)
HARDWARE = "Xid 79, GPU 0 has fallen off the bus"


def ended(*exits: WorkerExit, **facts: Any) -> bytes:
    return wire.encode(AttemptEnded(AttemptResult(0, "failed", exits, 1.0, **facts)))


@pytest.mark.parametrize("is_cause", [False, True], ids=["by an exit", "by the cause"])
def test_a_node_cannot_blame_another_host(is_cause: bool, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lie = replace(EXIT, host="node0", hardware=HARDWARE)
    said = ended(EXIT, cause=replace(lie, rank=0)) if is_cause else ended(lie)
    session = Session(state, 1, [wire.encode(AgentReady(1)), started(1), said, wire.encode(AgentEnded())])
    session.run(monkeypatch)
    memory = state / "state/ddplaunch/nodes.json"
    known = json.loads(memory.read_text())["nodes"] if memory.exists() else []
    assert {event["host"] for event in known} == (set() if is_cause else {"node1"})
    report = json.loads((session.folder / "report.json").read_text())
    assert [exit_["host"] for attempt in report["attempts"] for exit_ in attempt["exits"] if exit_["rank"]] == ["node1"]


@pytest.mark.parametrize(
    "record",
    [
        AttemptEnded(AttemptResult(0, "failed", (replace(EXIT, rank=0),), 1.0)),
        AttemptEnded(AttemptResult(0, "failed", (EXIT, EXIT), 1.0)),
        AttemptStarted(0, 1 << 20, (11,), 1, 2, 1),
        AttemptStarted(0, 2, (11, 12), 1, 2, 0),
        AttemptStarted(0, 2, (11,), 1, 2, 2),
        AttemptStarted(0, 2, (11,), 2, 2, 1),
    ],
    ids=["ranks of others", "a rank twice", "a huge world", "more than it has", "beyond the last", "a node too many"],
)
def test_a_node_has_no_place_and_no_ranks_but_its_own(
    record: AttemptStarted | AttemptEnded, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = started(1) if isinstance(record, AttemptEnded) else b""
    session = Session(state, 1, [wire.encode(AgentReady(1)), before + wire.encode(record)])
    session.goes_on(monkeypatch)
    assert f"the agent on node1 was given up: its {type(record).__name__} is invalid: " in shown(session)
    assert shown(session).count("node1 was given up") == 1


def test_a_node_that_is_lost_before_it_was_ready_takes_no_other_along(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has met the other one all the same: that says so when the launcher has given the first one up."""
    session = Session(state, 1, [b"no record\n"])
    session.goes_on(monkeypatch)
    assert "the connection to node1 has ended; the job can go on without it" in shown(session)


# Errors of the launcher.


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes NodeDetails of one node an error."""
    handle = Run._handle

    def of_node(index: int) -> None:
        def fail(self: Run, node: Node, event: object) -> None:
            if node.index == index and isinstance(event, NodeDetails):
                raise KeyError("a\x1bb")
            handle(self, node, event)

        monkeypatch.setattr(Run, "_handle", fail)

    return of_node


DETAILS = wire.encode(NodeDetails(1, (), "3.11", "2.13"))


def test_an_error_of_the_launcher_costs_the_node_whose_record_it_is(
    broken: Callable[[int], None], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(1)
    session = Session(state, 1, [wire.encode(AgentReady(1)) + DETAILS + DETAILS])
    session.goes_on(monkeypatch)
    told = r"the agent on node1 was given up: its NodeDetails cannot be handled: KeyError: 'a\x1bb'"
    assert shown(session).count(f"ddplaunch: {told}; the job can go on without it\n") == 1


def test_output_that_cannot_be_shown_costs_the_node(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("colour")

    monkeypatch.setattr(Console, "output", fail)
    session = Session(state, 1, [wire.encode(AgentReady(1)), wire.encode(Output("node1", 1, 0, "stdout", 0))])
    session.goes_on(monkeypatch)
    assert "its Output cannot be shown: KeyError: 'colour'" in shown(session)


def test_output_whose_runs_are_not_those_of_its_bytes_costs_the_node(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = Output("node1", 1, 0, "stdout", 4, runs=(2, 3))
    session = Session(state, 1, [wire.encode(AgentReady(1)), wire.encode(header) + b"a\nb\n"])
    session.goes_on(monkeypatch)
    assert "its Output cannot be shown: ValueError: the runs of an output are not those of its bytes" in shown(session)


def fail(*_: object) -> None:
    raise KeyError("a\x1bb")


def post_with_details(event: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch posts this each time that a node tells of itself."""

    def on_event(self: Watches, index: int, record: object) -> None:
        if isinstance(record, NodeDetails):
            self._run.post(event)  # type: ignore[arg-type]

    monkeypatch.setattr(Watches, "on_node_event", on_event)


def break_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    post_with_details(SignalReceived(signal.SIGTERM), monkeypatch)
    monkeypatch.setattr(Shutdown, "on_signal", fail)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a function that a watch has posted": partial(post_with_details, fail),
    "a signal": break_signals,
    "what a run waits for": lambda patch: patch.setattr(NodeProgress, "run_due", fail),
    "the timer of a watch": lambda patch: patch.setattr(HangWatch, "run_due", fail),
    "the pings": lambda patch: patch.setattr(pings.Pings, "run_due", fail),
}


@pytest.mark.parametrize("place", ["a record", *BUGS])
def test_on_this_machine_it_is_a_bug_that_ends_the_run_in_order(
    place: str, broken: Callable[[int], None], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = r"KeyError: 'a\x1bb'"
    if place in BUGS:
        BUGS[place](monkeypatch)
    else:
        broken(0)
        told = f"on node0: its NodeDetails cannot be handled: {told}"
    session = Session(state, 1, [])
    session.config = launch_config(script="x.py", log_dir=str(state / "runs"))
    said = [AgentReady(1), AttemptStarted(0, 1, (11,), 0, 1, 0)]
    stopped = ended(replace(EXIT, rank=0, returncode=-15, stopped=True), attempt_follows=False)

    def local(agent: SpokenHandle, record: object) -> None:
        if isinstance(record, AgentSpec):
            agent.say(*said)
            agent.hear(DETAILS + DETAILS)
        elif isinstance(record, StopWorkers):
            agent.hear(stopped + wire.encode(AgentEnded()))
            agent.end()

    monkeypatch.setattr(Session, "answers", lambda _: [local, local])
    monkeypatch.setattr(SpokenTransport, "is_remote", False)
    result, error = session.run(monkeypatch)
    assert result is None
    assert error
    assert error.exit_code == INTERNAL
    begin, *rest = error.message.split("\n")
    assert begin == f"a bug in ddplaunch: {told}"
    assert rest[0] == "Traceback (most recent call last):"
    report = json.loads((session.folder / "report.json").read_text())
    assert (report["exit_code"], report["reason"]) == (INTERNAL, error.message)
    assert [exit_["returncode"] for exit_ in report["attempts"][0]["exits"]] == [-15]


def test_a_node_is_believed_while_another_ones_first_record_is_on_its_way() -> None:
    """The nodes may have met over a network that is faster than the launcher's connection to one of them."""
    participants = participants_of((2, 2), "a", "b", rendezvous=rendezvous_config())
    config = launch_config(script="x.py", hosts=tuple(map(Host, "ab")), min_nodes=2, max_nodes=2)
    checks, (first, second) = RecordChecks(config, participants), participants.nodes.all
    first.workers = 8
    checks.check(first, AttemptStarted(0, 16, tuple(range(8)), 0, 2, 0))
    second.workers = 8
    checks.check(second, AttemptStarted(0, 16, tuple(range(8)), 1, 2, 8))
    with pytest.raises(wire.ProtocolError, match="do not fit"):
        checks.check(second, AttemptStarted(0, 32, tuple(range(8)), 1, 2, 8))
