"""--stacks in the launcher: which nodes are asked, and what is answered."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ddplaunch.features.hangs.examinations import EXAMINATION_S, RequestedExaminations
from ddplaunch.features.hangs.records import ExamineRun, RunExamined, WorkersExamined
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import ANSWER_S, RequestRefused
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.protocol.results import AttemptResult
from ddplaunch.transport.handle import ChannelClosed
from tests.support import golden
from tests.support.configs import launch_config, rendezvous_config
from tests.support.hangs import call, done, evidence
from tests.support.watches import run_services

pytestmark = pytest.mark.usefixtures("utc")

FIRST = (1 << 20) + 1
RANKS = {
    "waits": [evidence(0, [*done(5), call(6)], world=2, where="train.py:6 in step")],
    "elsewhere": [evidence(1, done(5), world=2, where="train.py:4 in load")],
    "writes": [evidence(1, done(5), world=2, silent_s=0.1)],
    "none": [],
}


class Launcher:
    """The examinations of one run. Its methods are the steps of a story."""

    def __init__(self, folder: Path, kind: str) -> None:
        """``kind``: ``one`` launcher, or ``each`` node has its own."""
        self.said: list[str] = []
        self.folder, self.asked = folder, 0
        meets = {"rendezvous": rendezvous_config(), "min_nodes": 2, "max_nodes": 2} if kind == "each" else {}
        config = launch_config(script="train.py", **meets)
        send = lambda order: self.said.append(f"order: {order}")  # noqa: E731
        self.examinations = RequestedExaminations(run_services(config, send, folder))

    def ask(self) -> None:
        self.asked += 1
        self.examinations.on_request(ExamineRun("job7"), self._take(self.asked))
        self.due()

    def _take(self, number: int):  # type: ignore[no-untyped-def]
        def take(answer: RunExamined | RequestRefused) -> None:
            found = wire.decode(wire.encode(answer), (RequestRefused, RunExamined))
            assert isinstance(found, RunExamined)
            path = found.path.replace(str(self.folder), "<folder>")
            parts = [*found.sentences, *found.lines, path, found.all_nodes_at and f"all nodes: {found.all_nodes_at}"]
            self.said.extend(f"answer {number}: {part}" for part in parts if part)

        return take

    def start(self, *nodes: str, attempt: str = "0") -> None:
        for index in nodes:
            self.examinations.on_event(int(index), AttemptStarted(int(attempt), 2, (), 0, 1, 0))

    def start_next(self, index: str) -> None:
        self.start(index, attempt="1")

    def end(self, index: str, attempt: str = "0") -> None:
        result = AttemptResult(int(attempt), "stopped", (), 1.0, attempt_follows=True)
        self.examinations.on_event(int(index), AttemptEnded(result))

    def close(self, index: str) -> None:
        self.examinations.on_event(int(index), ChannelClosed())

    def answer(self, index: str, ranks: str, nodes: str = "01", all_nodes_at: str = "", number: str = "1") -> None:
        """A node answers the examination with this number; ``nodes`` take part."""
        participants = tuple(map(int, nodes))
        found = WorkersExamined(
            0, FIRST - 1 + int(number), tuple(RANKS[ranks]), all_nodes_at=all_nodes_at.replace("-", "")
        )
        self.examinations.on_report(int(index), participants, found)
        self._wait()

    def _wait(self) -> None:
        """Until a thread has answered, if there is one."""
        for thread in threading.enumerate():
            if thread.name == "stacks":
                thread.join(30)

    def due(self) -> None:
        self.deadline = self.examinations.run_due(0.0)

    def give_up(self) -> None:
        """The time for answers is over."""
        self.examinations.run_due(self.examinations.run_due(1.0))
        self._wait()

    def files(self) -> None:
        self.said.extend(sorted(path.name for path in self.folder.iterdir()))


def test_who_is_asked_and_what_is_answered(tmp_path: Path) -> None:
    """A story is the kind of launcher, and steps."""

    def story(text: str) -> str:
        _, kind, steps = text.split(": ")
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        return golden.play(Launcher(folder, kind), steps)

    golden.check_pages("requested_examinations", story)


def test_a_request_that_waits_for_another_examination_is_answered_in_time() -> None:
    assert 2 * EXAMINATION_S < ANSWER_S
