"""--stacks in the launcher: which nodes are asked, and what is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.features.hangs.examination import EXAMINATION_S
from ddplaunch.features.hangs.records import ExamineRun, ExamineWorkers, RankEvidence, RunExamined, WorkersExamined
from ddplaunch.features.hangs.requested_examinations import RequestedExaminations
from ddplaunch.launcher.control_socket import ControlRequest
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import ANSWER_S, RequestRefused
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, OrderToNodes, ReportOfNode
from ddplaunch.protocol.results import AttemptResult
from ddplaunch.transport.handle import ChannelClosed
from tests.support.configs import launch_config, rendezvous_config
from tests.support.hangs import call, done, evidence

FIRST = (1 << 20) + 1


class Launcher:
    """The examinations of one run, what they send, and the answers."""

    def __init__(self, folder: Path | None, *, nodes_have_launchers: bool = False) -> None:
        self.sent: list[object] = []
        self.is_whole = nodes_have_launchers
        config = launch_config(
            script="train.py",
            **({"rendezvous": rendezvous_config(), "min_nodes": 2, "max_nodes": 2} if nodes_have_launchers else {}),
        )
        self.examinations = RequestedExaminations(config, self.sent.append, lambda: folder)

    def ask(self) -> list[RunExamined | RequestRefused]:
        answers: list[RunExamined | RequestRefused] = []
        take = lambda answer: answers.append(wire.decode(wire.encode(answer), (RequestRefused, RunExamined)))  # noqa: E731
        self.examinations.on_request(ControlRequest(ExamineRun("job7"), take))
        self.examinations.run_due(0.0)
        return answers

    def answer(self, index: int, participants: tuple[int, ...], *ranks: RankEvidence, **fields: str) -> None:
        number = self.order.number
        answer = WorkersExamined(0, number, ranks, **fields)
        is_passed_on = self.is_whole and not fields
        event = ReportOfNode(index, participants, answer) if is_passed_on else answer
        self.examinations.on_event(0 if is_passed_on else index, (0,) if is_passed_on else participants, event)

    @property
    def order(self) -> ExamineWorkers:
        order = self.sent[-1]
        order = order.order if isinstance(order, OrderToNodes) else order
        assert isinstance(order, ExamineWorkers)
        return order


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    found = Launcher(tmp_path)
    for index in (0, 1):
        found.examinations.on_event(index, (), AttemptStarted(0, 2, (), 0, 1, 0))
    return found


WAITING = [evidence(rank, [*done(5), call(6)], world=2, where="train.py:6 in step") for rank in (0,)]
ELSEWHERE = evidence(1, done(5), world=2, where="train.py:4 in load")


def test_all_nodes_are_asked_and_the_answer_explains(launcher: Launcher, tmp_path: Path) -> None:
    answers = launcher.ask()
    assert launcher.sent == [ExamineWorkers(0, FIRST, is_requested=True)]
    launcher.answer(0, (0, 1), *WAITING)
    assert answers == []
    launcher.answer(1, (0, 1), ELSEWHERE)
    [answer] = answers
    assert isinstance(answer, RunExamined)
    assert answer.sentences[0] == "nothing moved in the last 5.0 s; no output for 1 min"
    assert "rank 1 never joined all_reduce #6" in answer.sentences[1]
    assert answer.lines == ("rank 0: waiting, at train.py:6 in step", "rank 1: still, at train.py:4 in load")
    assert answer.path == str(tmp_path / "hang.txt")
    assert "train.py" in (tmp_path / "hang.json").read_text()


def test_of_a_job_that_moves_no_rank_is_blamed(launcher: Launcher) -> None:
    answers = launcher.ask()
    launcher.answer(0, (0, 1), *WAITING)
    launcher.answer(1, (0, 1), evidence(1, done(5), world=2, silent_s=0.1))
    assert answers[0].sentences == (
        "the job moves: rank 1 wrote output, or called or finished a collective, in the last 5.0 s",
    )


def test_requests_during_an_examination_share_the_next(launcher: Launcher) -> None:
    first, second, third = launcher.ask(), launcher.ask(), launcher.ask()
    assert len(launcher.sent) == 1
    for number in (FIRST, FIRST + 1):
        assert launcher.order.number == number
        for index in (0, 1):
            launcher.answer(index, (0, 1), evidence(index))
        launcher.examinations.run_due(0.0)
    assert [len(answers) for answers in (first, second, third)] == [1, 1, 1]
    assert len(launcher.sent) == 2


def test_a_node_that_does_not_answer_is_counted(launcher: Launcher) -> None:
    answers = launcher.ask()
    launcher.answer(0, (0, 1), *WAITING)
    deadline = launcher.examinations.run_due(1.0)
    launcher.examinations.run_due(deadline)
    assert answers[0].sentences[-1] == "1 node has not answered within 20 s"
    launcher.answer(1, (0, 1), ELSEWHERE)  # Too late.
    assert len(answers) == 1


def test_nothing_is_asked_where_no_worker_runs(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    assert launcher.ask()[0].sentences == ("nothing to examine: the workers have not started",)
    launcher.examinations.on_event(0, (), AttemptStarted(0, 2, (), 0, 1, 0))
    launcher.examinations.on_event(0, (), AttemptEnded(AttemptResult(0, "failed", (), 1.0)))
    assert launcher.ask()[0].sentences == ("nothing to examine: the workers have ended",)
    launcher.examinations.on_event(0, (), AttemptStarted(1, 2, (), 0, 1, 0))
    launcher.examinations.on_event(0, (), ChannelClosed())
    launcher.ask()
    assert launcher.sent == []


def test_a_start_that_another_node_has_overtaken_keeps_nobody_waiting(launcher: Launcher) -> None:
    """Node 1 starts the next attempt before all that node 2 has sent of the last one has arrived."""
    over = AttemptEnded(AttemptResult(0, "stopped", (), 1.0, attempt_follows=True))
    for index, event in ((1, over), (1, AttemptStarted(1, 2, (), 0, 1, 0)), (2, AttemptStarted(0, 2, (), 0, 1, 0))):
        launcher.examinations.on_event(index, (), event)
    answers = launcher.ask()
    launcher.answer(1, (0, 1), ELSEWHERE)
    assert len(answers) == 1
    for index, number in ((0, 0), (1, 1), (2, 0)):
        ended = AttemptEnded(AttemptResult(number, "stopped", (), 1.0))
        launcher.examinations.on_event(index, (), ended)
    assert launcher.ask()[0].sentences == ("nothing to examine: the workers have ended",)


def test_workers_that_end_meanwhile_leave_no_file(launcher: Launcher, tmp_path: Path) -> None:
    answers = launcher.ask()
    for index in (0, 1):
        launcher.answer(index, (0, 1))
    assert answers == [RunExamined(sentences=("nothing to examine: the workers have ended",))]
    assert list(tmp_path.iterdir()) == []


def test_where_each_node_has_a_launcher_the_first_answer_says_who_else_answers(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, nodes_have_launchers=True)
    launcher.examinations.on_event(0, (), AttemptStarted(0, 2, (), 0, 1, 0))
    answers = launcher.ask()
    assert isinstance(launcher.sent[0], OrderToNodes)
    launcher.answer(3, (3, 7), *WAITING)
    assert answers == []
    launcher.answer(7, (3, 7), ELSEWHERE)
    assert len(answers) == 1
    assert answers[0].all_nodes_at == ""


def test_a_launcher_that_knows_only_its_node_says_where_to_ask(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, nodes_have_launchers=True)
    launcher.examinations.on_event(0, (), AttemptStarted(0, 2, (), 0, 1, 0))
    answers = launcher.ask()
    launcher.answer(0, (0,), *WAITING, all_nodes_at="node1:29400")
    assert answers[0].all_nodes_at == "node1:29400"


def test_a_request_that_waits_for_another_examination_is_answered_in_time() -> None:
    assert 2 * EXAMINATION_S < ANSWER_S
