"""The look-up of the workers' store: how the workers start, and what the user reads, if no name server answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from ddplaunch.agent.rendezvous.name_lookup import NameLookup
from ddplaunch.system import network
from tests.support.configs import agent_spec
from tests.support.processes import wait_until

SPEC = agent_spec(host="node1")


@pytest.fixture
def asked() -> list[str]:
    """The addresses whose look-up has begun."""
    return []


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> Iterator[threading.Event]:
    """The look-ups end when it is set."""
    event = threading.Event()

    def reverse_name(address: str) -> str:
        asked.append(address)
        event.wait(10)
        return ""

    monkeypatch.setattr(network, "reverse_name", reverse_name)
    monkeypatch.setattr(network, "SLOW_LOOKUP_S", 0.01)
    yield event
    event.set()


def test_without_an_answer_workers_are_impatient_and_the_line_for_the_hosts_file_is_shown(
    answer: threading.Event, asked: list[str]
):
    posted: list[object] = []
    lookup = NameLookup("10.0.0.1", posted.append)
    wait_until(lambda: asked)
    asked_at = time.monotonic()
    wait_until(lambda: lookup.is_slow and time.monotonic() > asked_at + 2 * network.SLOW_LOOKUP_S)
    assert lookup.worker_environ == {"RES_OPTIONS": "timeout:1 attempts:1"}
    notice = lookup.notice(SPEC, 0)
    assert notice
    assert "`::ffff:10.0.0.1 node1` to /etc/hosts" in notice.text
    assert lookup.notice(SPEC, 0) is None, "it is told once"
    assert not posted
    answer.set()
    wait_until(lambda: posted)
    assert lookup.is_done
    assert lookup.is_slow


@pytest.mark.parametrize(
    ("address", "line"), [("127.0.0.1", "::ffff:127.0.0.1 localhost"), ("fd00::1", "fd00::1 NAME")]
)
def test_the_line_has_the_form_that_torch_looks_up(answer: threading.Event, address: str, line: str):
    lookup = NameLookup(address, lambda _event: None)
    wait_until(lambda: lookup.is_slow)
    notice = lookup.notice(SPEC, 1)
    assert notice
    assert (f"`{line}`" in notice.text, notice.level) == (True, 0)


def test_an_answer_changes_nothing(answer: threading.Event, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "SLOW_LOOKUP_S", 30.0)
    answer.set()
    lookup = NameLookup("localhost", lambda _event: None)
    wait_until(lambda: lookup.is_done)
    assert not lookup.is_slow
    assert lookup.worker_environ == {}


def test_a_host_that_cannot_be_resolved_is_left_to_the_workers():
    lookup = NameLookup("an..empty.label", lambda _event: None)
    wait_until(lambda: lookup.is_done)
    assert not lookup.is_slow
