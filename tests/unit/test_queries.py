"""Agents that run no job are waited for, but not for ever."""

from __future__ import annotations

import math
import os

import pytest

from ddplaunch.config import RemoteConfig
from ddplaunch.features.ps import ask_launchers, ps
from ddplaunch.features.ps.queries import RunOnHost, RunsFound
from ddplaunch.features.runs.asked_nodes import Queries
from ddplaunch.launcher import setup
from ddplaunch.protocol.launcher_agent import AgentEnded
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import Post
from ddplaunch.transport.local import LocalTransport
from tests.support.asked import asked
from tests.support.fake_agents import FakeHandle, FakeTransport


def test_an_agent_on_this_machine_has_a_deadline_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTransport, "_start_agent", lambda *_: FakeHandle())
    with ps.agents((), RemoteConfig()) as queries:
        [here] = queries.nodes
        assert here.deadline < math.inf
        here.deadline = 0.0
        queries.wait(queries.nodes, RunsFound)
    assert here.failure
    assert here.failure.message == "no answer in time"


def test_agents_that_do_not_end_are_waited_for_together_and_those_that_have_failed_not_at_all() -> None:
    waited: list[float] = []

    class Stuck(FakeHandle):
        def close(self, timeout_s: float = 5.0) -> int:
            waited.append(timeout_s)
            return super().close()

    transport = FakeTransport("gpu1", "gpu2")
    transport.start = lambda *_: Stuck()  # type: ignore[method-assign]
    queries = Queries()
    queries.start(transport, "a query")  # type: ignore[arg-type]
    queries.nodes[0].failure = HostFailure("gpu1", "timeout", "no answer in time")
    queries.close(0.001)
    assert waited[0] == 0
    assert 0 <= waited[1] <= 0.001


@pytest.mark.parametrize("is_verbose", [False, True])
@pytest.mark.parametrize("option", ["ps", "kill"])
def test_processes_that_could_not_be_inspected_are_reported_with_v_only(
    option: str, is_verbose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answering(_self: LocalTransport, _index: int, post: Post, *_: object) -> FakeHandle:
        job = RunOnHost(
            run_tag="job7.0a1b2c",
            run_id="job7",
            counts=(("worker", 2),),
            age_s=1.0,
            memory_bytes=0,
            launcher_alive=False,
        )
        post(RunsFound("m", (job,), (1,)))
        post(AgentEnded())
        return FakeHandle()

    monkeypatch.setattr(LocalTransport, "_start_agent", answering)
    monkeypatch.setattr(setup, "local_host_name", lambda: "here")
    shown: list[str] = []
    if option == "ps":
        ps.ps(asked("", shown.append, verbose=is_verbose))
    else:
        ps.kill(asked("job7", shown.append, verbose=is_verbose, grace_s=0.0))
    assert any("2 workers" in line for line in shown)
    assert ("here: a process of yours could not be inspected (pid 1)" in shown) is is_verbose


def test_a_launcher_whose_files_may_not_be_read_is_not_said_to_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patched:
        patched.setattr(ask_launchers.os, "listdir", refuse)
        why = ask_launchers._without_socket(os.getpid())
    assert why == f"its control socket cannot be found: /proc/{os.getpid()}/fd: Permission denied"
