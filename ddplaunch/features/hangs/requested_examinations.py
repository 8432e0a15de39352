"""Has the workers examined because the user wants to know what they do (``--stacks``), whatever the limits say.

Runs in the launcher, in the main thread. Requests that come during an examination share the next one. The answer is
what the job does in sentences, and a line for the ranks that do the same. Must not decide anything about the job:
``HangWatch`` does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.examination import EXAMINATION_S, Examination
from ddplaunch.features.hangs.rank_state import JobState, RankState, rank_state
from ddplaunch.features.hangs.records import (
    MAX_LINES,
    ExamineRun,
    ExamineWorkers,
    RunExamined,
    WorkersExamined,
)
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.control_socket import ControlRequest
from ddplaunch.launcher.watches import Watch
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, OrderToNodes, ReportOfNode
from ddplaunch.text import duration, plural, quote, ranks
from ddplaunch.transport.handle import ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.hangs.explanation import Explanation
    from ddplaunch.features.hangs.records import RankEvidence

_NEVER = float("inf")
_FIRST_NUMBER = 1 << 20
"""Those of ``HangWatch`` are smaller: it must not take these answers for its own."""

_MAX_SENTENCE, _MAX_WHERE, _MAX_PATH = 1000, 200, 4096


@dataclass
class _Examination(Examination):
    """One that the user has asked for."""

    requests: list[ControlRequest] = field(default_factory=list)


class RequestedExaminations(Watch):
    """Those of one run."""

    def __init__(
        self,
        config: LaunchConfig,
        send: Callable[[object], None],
        folder: Callable[[], Path | None],
    ) -> None:
        """No examination goes on.

        Args:
            config: that of the run.
            send: sends to all nodes of this launcher.
            folder: returns the run folder, which gets the files; None if no files are kept.
        """
        self._folder, self._number = folder, _FIRST_NUMBER
        self._nodes_have_launchers = bool(config.rendezvous)
        self._send = (lambda order: send(OrderToNodes(order))) if config.rendezvous else send
        self._attempt = -1
        self._attempts: dict[int, int] = {}
        """By node: the attempt of its running workers. One may be in the next before the end of another's is read."""
        self._waiting: list[ControlRequest] = []
        self._examination: _Examination | None = None

    # Events.

    def on_request(self, request: ControlRequest) -> bool:
        """A client asks; ``run_due`` begins the examination."""
        if not isinstance(request.request, ExamineRun):
            return False
        if not self._running:
            when = "have ended" if self._attempt >= 0 else "have not started"
            request.answer(RunExamined(sentences=(f"nothing to examine: the workers {when}",)))
        else:
            self._waiting.append(request)
        return True

    def on_event(self, index: int, participants: Sequence[int], event: object) -> None:
        """An event of node ``index``; ``participants`` are the nodes of this launcher. Other events have no effect."""
        match event:
            case AttemptStarted(attempt=attempt):
                self._attempts[index], self._attempt = attempt, max(attempt, self._attempt)
            case AttemptEnded() | ChannelClosed():
                self._attempts.pop(index, None)
            case WorkersExamined():
                self._on_examined(index, participants, event)
            case ReportOfNode(report=WorkersExamined() as report):
                self._on_examined(event.node_index, event.participants, report)

    @property
    def _running(self) -> set[int]:
        """The nodes whose workers run in the newest attempt."""
        return {index for index, attempt in self._attempts.items() if attempt == self._attempt}

    def _on_examined(self, index: int, participants: Sequence[int], event: WorkersExamined) -> None:
        if self._examination and self._examination.take(index, participants, event):
            self._conclude(self._examination)

    def run_due(self, now: float) -> float:
        """Begin or end an examination. Returns when to call again."""
        if self._examination and now >= self._examination.deadline:
            self._conclude(self._examination)
        if self._waiting and not self._examination:
            self._begin(now)
        return self._examination.deadline if self._examination else _NEVER

    # Examinations.

    def _begin(self, now: float) -> None:
        # Where each node has its own launcher, the first answer says which nodes there are.
        expected = set() if self._nodes_have_launchers else set(self._running)
        self._number += 1
        requests, self._waiting = self._waiting, []
        self._examination = _Examination(self._number, self._attempt, now + EXAMINATION_S, expected, requests=requests)
        self._send(ExamineWorkers(self._attempt, self._number, is_requested=True))

    def _conclude(self, examination: _Examination) -> None:
        self._examination = None
        answer = self._answer(examination)
        for request in examination.requests:
            request.answer(answer)

    def _answer(self, examination: _Examination) -> RunExamined:
        found = examination.explained()
        path = examination.write(self._folder(), found)
        return RunExamined(
            sentences=(*_sentences(examination.ranks, found), *_missing(examination)),
            lines=_lines(examination.ranks),
            path=quote(str(path), _MAX_PATH) if path else "",
            all_nodes_at=examination.all_nodes_at,
        )


def _missing(examination: _Examination) -> list[str]:
    count = len(examination.missing)
    if not count and examination.answered:
        return []
    have = "has" if count == 1 else "have"
    return [f"{plural(count, 'node') if count else 'the nodes'} {have} not answered within {EXAMINATION_S:.0f} s"]


def _sentences(evidences: Sequence[RankEvidence], found: Explanation) -> tuple[str, ...]:
    """Whether the job moves; if not, ``found``'s explanation."""
    running = [each for each in evidences if each.is_running]
    if not running:
        return ("nothing to examine: the workers have ended",)
    window = f"in the last {max(each.window_s for each in running):.1f} s"
    if found.job_state is JobState.MOVING:
        moving = [each.rank for each in running if rank_state(each) is RankState.MOVING]
        return (f"the job moves: {ranks(moving)} wrote output, or called or finished a collective, {window}",)
    silent = f"no output for {duration(min(each.silent_s for each in running))}"
    first = {
        JobState.STUCK: f"nothing moved {window}; {silent}",
        JobState.BUSY: f"some ranks wait for others, and some are busy {window}; {silent}",
        JobState.QUIET: f"no rank waits for another; some are busy {window}; {silent}",
    }[found.job_state]
    return (first, *(quote(sentence, _MAX_SENTENCE) for sentence in found.sentences))


def _lines(evidences: Sequence[RankEvidence]) -> tuple[str, ...]:
    """``ranks 0, 2-3: waiting, at train.py:6 in step``; ordered by the lowest rank."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for evidence in evidences:
        alike[_line(evidence)].append(evidence.rank)
    groups = sorted(alike.items(), key=lambda item: min(item[1]))
    shown = [f"{ranks(members)}: {text}" for text, members in groups[: MAX_LINES - 1]]
    others = sum(len(members) for _, members in groups[MAX_LINES - 1 :])
    return tuple([*shown, f"{plural(others, 'more rank')} elsewhere"] if others else shown)


def _line(evidence: RankEvidence) -> str:
    state = rank_state(evidence).value
    parts = [state, f"at {quote(evidence.where, _MAX_WHERE)}" if evidence.where else "", evidence.blocked_state]
    return ", ".join(quote(part, _MAX_WHERE) for part in parts if part)
