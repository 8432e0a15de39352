"""Agents that run no job are waited for, but not for ever."""

from __future__ import annotations

import math

import pytest

from ddplaunch.commands import run_queries
from ddplaunch.config import RemoteConfig
from tests.support.fake_agents import FakeHandle


def test_an_agent_on_this_machine_has_a_deadline_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queries, "_start_here", lambda _post: FakeHandle())
    with run_queries.agents((), RemoteConfig()) as queries:
        [here] = queries.nodes
        assert here.deadline < math.inf
        here.deadline = 0.0
        queries.wait(queries.nodes, lambda machine: machine.runs is not None)
    assert here.failure
    assert here.failure.message == "no answer in time"
