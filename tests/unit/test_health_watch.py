"""The launcher shows what agents find, and decides about nodes that must not be used; the nodes are not real."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ddplaunch.errors import LaunchError
from ddplaunch.features.health.launcher import HealthWatch
from ddplaunch.features.health.records import NodeHardware, NodeHealth
from ddplaunch.protocol.launcher_agent import AttemptStarted, Pong
from ddplaunch.protocol.results import HealthFinding
from ddplaunch.protocol.run_result import RunResult
from tests.support.configs import rendezvous_config
from tests.support.fake_agents import participants_of
from tests.support.watches import run_services

ROW = HealthFinding(
    rule="row-remap-failed", text="a row is lost", action="drain", severity="refuse", gpu=2, uuid="GPU-2"
)


class Job:
    """A run of nodes whose agents are not real."""

    def __init__(self, nnodes: tuple[int, int], *hosts: str, policy: str = "refuse") -> None:
        self.said: list[str] = []
        show = lambda text, _level: self.said.append(text)  # noqa: E731
        self.participants = participants_of(nnodes, *hosts, rendezvous=rendezvous_config(), show=show)
        self.nodes = self.participants.nodes
        for node in self.nodes.all:
            self.nodes.on_agent_connected(node)
        self.participants.check_and_announce()
        self.errors: list[LaunchError] = []
        self.noted: list[tuple[str, int, str]] = []
        shutdown = SimpleNamespace(in_progress=False, fail=self.errors.append)
        config: Any = SimpleNamespace(health=policy, one_launcher_leads=True)
        parts = {"nodes": self.nodes, "participants": self.participants, "shutdown": shutdown, "note": self._note}
        self.watch = HealthWatch(run_services(config, show=show, **parts))

    def _note(self, event: str, text: str, node: int, **facts: object) -> None:
        self.noted.append((event, node, text))

    def report(self, index: int, *findings: HealthFinding, **values: int) -> None:
        health = NodeHealth(findings=findings, hardware=NodeHardware(**values))
        self.watch.on_event(index, health)

    def findings(self) -> tuple[HealthFinding, ...]:
        return self.watch.add_to_result(RunResult("job7", 0, "succeeded", 1.0)).health

    def decide(self, after_s: float = 0.0) -> None:
        self.watch.run_due(time.monotonic() + after_s)


def test_a_spare_that_is_refused_later_is_replaced_too() -> None:
    job = Job((1, 2), "a", "b", "c")
    for index in (0, 1):
        job.report(index, *((ROW,) if index else ()))
    job.decide()
    job.nodes.on_agent_connected(job.nodes.all[2])
    job.report(2, ROW)
    job.decide()
    assert job.participants.indices == [0]


def test_a_refused_node_that_is_lost_before_the_decision_is_replaced_once() -> None:
    job = Job((1, 3), "a", "b", "c")
    job.report(1, ROW)
    job.nodes.sweep(job.nodes.all[1])
    job.participants.replace_or_shrink(job.nodes.all[1])
    job.decide(after_s=60)
    assert (job.participants.indices, job.errors) == ([0, 2], [])


def test_a_finding_while_the_job_runs_is_shown_with_its_ranks() -> None:
    job = Job((2, 2), "a", "b")
    started = AttemptStarted(attempt=0, world_size=8, pids=(1, 2, 3, 4), node_rank=1, nnodes=2, first_rank=4)
    job.watch.on_event(1, started)
    job.watch.on_event(1, replace(ROW, local_ranks=(2,)))
    assert job.said == ["b: GPU 2 (GPU-2), local rank 2, rank 6: a row is lost (drain)"]
    assert job.findings()[0].ranks == (6,)


def test_differences_are_shown_once_and_a_node_that_comes_later_is_compared_too() -> None:
    job = Job((3, 3), "a", "b", "c", "d", "e")
    job.report(0, cpus=8)
    job.report(1, cpus=8)
    job.report(2, cpus=4)
    job.report(2, cpus=2)
    assert job.said == ["the nodes differ in CPUs: 4 on c, 8 on a,b"]
    for lost, spare, cpus in ((2, 3, 8), (1, 4, 16)):
        job.participants.replace_or_shrink(job.nodes.all[lost])
        job.report(spare, cpus=cpus)
    assert job.said[1:] == [
        "d replaces c",
        "e replaces b",
        "the nodes differ in CPUs: 16 on e, 8 on a,d",
    ]


def test_a_clock_is_wrong_only_if_that_is_certain_however_long_a_pong_has_taken() -> None:
    job, now = Job((2, 2), "a", "b"), time.time()
    for sent_s, clock_s in ((now - 60, now - 50), (now, 0.0), (now - 0.1, now - 0.1), (now - 0.1, now - 60)):
        job.watch.on_event(0, Pong(sent_s, clock_s))
    assert job.said == [], "the third answer was exact: the clock may be set later"
    job.watch.on_event(1, Pong(now - 0.1, now + 65))
    assert len(job.said) == 1
    assert job.said[0].startswith("the clock of b is 1 min 4 s ahead"), job.said


def test_with_health_off_no_clock_is_looked_at() -> None:
    job = Job((1, 1), "a", policy="off")
    job.watch.on_event(0, Pong(time.time(), 1.0))
    assert job.said == []
