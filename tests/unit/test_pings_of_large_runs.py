"""A run of 256 simulated nodes: whatever the launcher is busy with, every node is pinged meanwhile.

Each test holds up one thing that takes long, until all nodes have got three more pings. Hangs and failures
are explained beside the main thread, which would keep the user's Ctrl-C waiting.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.features.collect_logs.log_writer import LogWriter
from ddplaunch.features.collect_logs.records import GrantLogBytes, LogChunk, LogsFound, LogsSent
from ddplaunch.features.hangs import examinations, explanation
from ddplaunch.features.hangs.records import (
    ExamineWorkers,
    RankEvidence,
    WorkerActivity,
    WorkersExamined,
)
from ddplaunch.launcher import launch, pings, setup
from ddplaunch.launcher.display.console import Console
from ddplaunch.launcher.display.messages import UserMessages
from ddplaunch.launcher.run import Run
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import (
    AgentEnded,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    JoinRendezvous,
    Ping,
    StopWorkers,
)
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.system.signals import SignalReceived
from ddplaunch.transport.handle import ChannelClosed, FromNode, NodeFacts, WithData
from tests.support.configs import launch_config
from tests.support.fake_agents import FakeHandle, FakeTransport
from tests.support.hangs import call, done, evidence
from tests.support.processes import wait_until

NODES = 256


def known(rank: int) -> RankEvidence:
    """All ranks wait for rank 1."""
    return replace(evidence(rank, done(2) if rank == 1 else [*done(2), call(3)], world=NODES), host=f"node{rank}")


def ended(rank: int, attempt: int) -> AttemptEnded:
    exit_ = WorkerExit(rank, 0, f"node{rank}", 100, 1, False, 1.0, 1.0)
    result = AttemptResult(attempt, "failed", (exit_,), 1.0, attempt_follows=not attempt, restart_count=attempt)
    return AttemptEnded(result, (WorkersExamined(attempt, 0, (known(rank),)),))


class Agent(FakeHandle):
    """A simulated agent; counts its pings."""

    def __init__(self, index: int, post: Callable[[object], None]) -> None:
        super().__init__()
        self.index, self.pings, self.has_sent_logs = index, 0, False
        self.orders = list[StopWorkers]()
        self.post = lambda event: post(FromNode(index, event))
        self.post(NodeFacts(torch="2.13"))

    def send(self, record: object) -> None:
        match record:
            case Ping():
                self.pings += 1
            case StopWorkers():
                self.orders.append(record)
            case AgentSpec():
                self.post(AgentReady(1))
            case JoinRendezvous(rendezvous=settings) if settings.is_server:
                self.post(EndpointOpen(settings.token, ("10.0.0.1",), 4321))
            case ExamineWorkers(number=number):
                self.post(WorkersExamined(0, number, (known(self.index),)))
            case GrantLogBytes() if not self.has_sent_logs:
                self.has_sent_logs = True
                self.post(WithData(LogChunk("attempt_0/0/stdout.log", 1, True), b"."))
                self.post(LogsSent(0))
                self.post(ChannelClosed())


class Cluster(FakeTransport):
    """All agents of a run."""

    def __init__(self, post: Callable[[object], None]) -> None:
        super().__init__(*(f"node{number}" for number in range(NODES)))
        self.agents: list[Agent] = []
        self._post = post

    def start(self, index: int) -> Agent:
        self.agents.append(Agent(index, self._post))
        return self.agents[-1]

    def have_pings(self, counts: list[int]) -> bool:
        return all(agent.pings >= count for agent, count in zip(self.agents, counts, strict=True))

    def post_each(self, event_of: Callable[[int], object]) -> None:
        for agent in self.agents:
            agent.post(event_of(agent.index))


class Script(Mailbox[object]):
    """The launcher's mailbox: when the launcher is idle, the next thing happens on all nodes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.cluster = Cluster(self.post)
        self._steps = self._script()

    def get(self, deadline: float = float("inf")) -> object:
        if self.is_empty and deadline:
            next(self._steps, None)
        return super().get(deadline)

    def _script(self) -> Iterator[None]:
        each = self.cluster.post_each
        for attempt in (0, 1):
            each(lambda index, attempt=attempt: AttemptStarted(attempt, NODES, (100,), index, NODES, index))  # type: ignore[misc]
            yield
            if not attempt:
                each(lambda _: WorkerActivity(0, 400.0, 400.0))
                while not (self._folder / "hang.txt").exists():
                    yield
            each(lambda index, attempt=attempt: ended(index, attempt))  # type: ignore[misc]
            yield
        each(lambda _: AgentEnded())
        each(lambda _: LogsFound(1))


def launch_all(script: Script, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunResult:
    """Run the whole job in this process."""
    monkeypatch.setattr(setup, "transport_for", lambda *_: script.cluster)
    config = launch_config(
        script="x.py", hosts=tuple(Host(f"node{n}") for n in range(NODES)), min_nodes=NODES, max_nodes=NODES,
        max_restarts=1, log_dir=str(folder), collect_logs=True, page=False, lost_after_s=1000.0,
    )  # fmt: skip
    with open(os.devnull, "w") as null:
        streams = null.fileno(), null.fileno()
        with contextlib.closing(Console(setup.console_style(config, folder, streams[0]), *streams)) as console:
            return Run(config, "r1", "r1", None, script, folder, console).run()


BESIDE = ("explain", "explain_failure", "write")


@pytest.mark.parametrize(
    ("place", "name", "times"),
    [
        (explanation, "explain", 1),
        (examinations.Examination, "write", 1),
        (explanation, "explain_failure", 2),
        (UserMessages, "attempt_ended", 2),
        (LogWriter, "put", 1),
    ],
)
def test_all_nodes_are_pinged_while_the_launcher_is_busy(
    place: Any, name: str, times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, calls = Script(tmp_path), []
    usual = getattr(place, name)

    def held_up(*args: Any, **keywords: Any) -> Any:
        if len(calls) < times:  # A log file of each node is put: one is enough.
            counts = [agent.pings + 3 for agent in script.cluster.agents]
            wait_until(lambda: script.cluster.have_pings(counts), 60.0, f"{name}: no pings")
            calls.append(name)
            assert (threading.current_thread() is threading.main_thread()) == (name not in BESIDE)
        return usual(*args, **keywords)

    monkeypatch.setattr(place, name, held_up)
    monkeypatch.setattr(pings, "INTERVAL_S", 0.05)
    result = launch_all(script, tmp_path, monkeypatch)
    assert [len(attempt.exits) for attempt in result.attempts] == [NODES, NODES]
    assert calls == [name] * times
    assert "pings" not in {thread.name for thread in threading.enumerate()}


def test_ctrl_c_stops_the_next_attempt_while_the_failure_of_the_last_one_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = Script(tmp_path)
    usual = explanation.explain_failure

    def interrupted(*args: Any) -> Any:
        if not script.cluster.agents[0].orders:
            script.post(SignalReceived(signal.SIGINT))
            wait_until(lambda: all(agent.orders for agent in script.cluster.agents), 60.0, "no order to stop")
        return usual(*args)

    monkeypatch.setattr(explanation, "explain_failure", interrupted)
    result = launch_all(script, tmp_path, monkeypatch)
    assert result.signal == "SIGINT"
    assert all(attempt.collectives for attempt in result.attempts)


@pytest.mark.parametrize("is_command", [True, False])
def test_the_records_of_a_large_run_are_not_searched_for_garbage_again_and_again(is_command: bool) -> None:
    """Such a search stops all threads. In another program's process, whose garbage we do not know, it goes on."""
    before, full = gc.get_threshold(), list[str]()
    look = lambda phase, info: full.append(phase) if info["generation"] == 2 else None  # noqa: E731
    gc.callbacks.append(look)
    try:
        with launch.without_full_collections() if is_command else contextlib.nullcontext():
            kept = [[number] for number in range(300_000)]
    finally:
        gc.callbacks.remove(look)
    assert len(kept) == 300_000
    assert bool(full) != is_command
    assert gc.get_threshold() == before
