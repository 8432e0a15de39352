"""Which nodes are pinged, when, and which are silent; times are made up, and the test is the thread that pings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddplaunch.errors import LaunchError
from ddplaunch.launcher import pings
from ddplaunch.launcher.nodes import Node, NodeState
from ddplaunch.launcher.pings import Pings
from ddplaunch.protocol.launcher_agent import Pong
from tests.support import golden
from tests.support.fake_agents import FakeHandle


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pings, "_run", lambda _: None)


class Watch:
    """Pings of three nodes, which count as lost after 5 s. The methods are the steps of a story."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.nodes = [Node(index, f"node{index}", FakeHandle(), NodeState.RUNNING) for index in range(3)]
        self.mailbox = SimpleNamespace(is_empty=True)
        silent = lambda node: self.said.append(f"{node.host} is silent at {self.now:g}")  # noqa: E731
        suspended = lambda: self.said.append("suspended")  # noqa: E731
        self.pings = Pings(5.0, self.mailbox, silent, suspended)

    def watch(self, number: str, now: str, extra_s: str = "0") -> None:
        self.pings.watch(self.nodes[int(number)], float(now), float(extra_s))

    def due(self, now: str) -> None:
        self.now = float(now)
        self.said.append(f"due again at {self.pings.run_due(self.now):g}")

    def beat(self, from_s: str, to_s: str) -> None:
        """The first node answers every second."""
        for second in range(int(from_s), int(to_s) + 1):
            self.now = float(second)
            self.pings.on_pong(self.nodes[0], Pong(), second)
            self.pings.run_due(second)

    def answer(self, number: str, now: str, ping: str = "-1") -> None:
        """The node answers one of its pings, the last one if ``ping`` is -1."""
        node = self.nodes[int(number)]
        self.pings.on_pong(node, Pong(node.handle.sent[int(ping)].time_s), float(now))  # type: ignore[attr-defined]

    def thread(self) -> None:
        """What the thread does every second."""
        self.pings.beat()

    def busy(self, is_busy: str) -> None:
        """Whether answers may wait to be read."""
        self.mailbox.is_empty = is_busy == "no"

    def heard(self, number: str, at: str) -> None:
        """When bytes of the node came last, for example of a record of a megabyte."""
        self.nodes[int(number)].handle.heard_at = float(at)  # type: ignore[attr-defined]

    def done(self, number: str) -> None:
        self.nodes[int(number)].state = NodeState.DONE

    def suspend(self, now: str) -> None:
        self.pings.suspend(float(now))

    def sent(self) -> None:
        """The time limits with which each node was pinged."""
        for node in self.nodes:
            self.said.append(f"{node.host}: {[ping.lost_after_s for ping in node.handle.sent]}")  # type: ignore[attr-defined]


def test_who_is_pinged_and_who_is_silent() -> None:
    golden.check_pages("pings", lambda story: golden.play(Watch(), story.partition(": ")[2]))


def test_pings_follow_one_another_in_a_second_however_long_it_takes_to_send_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    now, beats = 0.0, list[float]()

    def beat(_pings: Pings) -> None:
        nonlocal now
        beats.append(now)
        now += 0.3 if len(beats) < 3 else 2.5 if len(beats) == 3 else 0.0

    def wait(timeout_s: float) -> bool:
        nonlocal now
        now += max(0.0, timeout_s)
        return len(beats) == 6

    watch = Watch()
    monkeypatch.setattr(Pings, "beat", beat)
    monkeypatch.setattr(pings, "time", SimpleNamespace(monotonic=lambda: now))
    watch.pings._closed = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    watch.pings._run()
    assert beats == [1.0, 2.0, 3.0, 5.5, 6.5, 7.5]  # A machine that was suspended makes up for no pings.


@pytest.mark.usefixtures("no_threads")
def test_a_launcher_without_room_for_the_thread_says_so() -> None:
    with pytest.raises(LaunchError, match="cannot ping its nodes: can't start new thread"):
        Watch().watch("0", "0")
