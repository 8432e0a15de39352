"""Examinations of all nodes: the answers, what they say, its files for people and programs, and ``--stacks``.

Runs in the launcher. What takes seconds for hundreds of ranks, to explain and to write, is done in a thread.
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ddplaunch.features.hangs.rank_state import JobState, RankState, is_busy, rank_state
from ddplaunch.features.hangs.records import (
    MAX_LINES,
    ExamineRun,
    ExamineWorkers,
    NodeEvidence,
    RankEvidence,
    RunExamined,
    WorkersExamined,
    folded,
    unfolded,
)
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.watches import Reply, RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import Request, RequestRefused
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, Report
from ddplaunch.system.files import kept_files
from ddplaunch.text import duration, escape, grouped, plural, quote, ranks
from ddplaunch.threads import post_from_thread
from ddplaunch.transport.handle import ChannelClosed

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.features.hangs.explanation import Explanation
    from ddplaunch.launcher.display.messages import UserMessages

EXAMINATION_S = 20.0
"""Seconds for a node's answer to ExamineWorkers: with a suspended worker and without NCCL's answer it takes 8 s."""

_NEXT_ANSWER_S = 5.0
"""Seconds after each answer for the next one, too: those of thousands of nodes wait here to be decoded."""


@dataclass
class Question:
    """An order that all nodes of an attempt answer, each by a report with its number, until ``deadline``.

    Each answer puts ``deadline`` off if it is near.

    Attributes:
        expected: the nodes that answer; empty until the first answer says which those are.
        answers: by node.
    """

    number: int
    attempt: int
    deadline: float
    expected: set[int]
    answers: dict[int, Any] = field(default_factory=dict)

    def take(self, index: int, participants: Sequence[int], answer: Any) -> bool:
        """Take a report of node ``index``, one of ``participants``, if it is an answer to this, and its first.

        Returns whether all have answered with it.
        """
        if answer.number != self.number or index in self.answers:
            return False
        self.answers[index] = answer
        self.deadline = max(self.deadline, time.monotonic() + _NEXT_ANSWER_S)
        self.expected = self.expected or set(participants)
        return self.answers.keys() >= self.expected  # ``missing`` passes over all nodes.

    @property
    def missing(self) -> set[int]:
        """The nodes that have not answered."""
        return self.expected - self.answers.keys()


@dataclass
class Examination(Question):
    """What the nodes answer to an ExamineWorkers; number 0: nobody has asked, they answer before a stop.

    Attributes:
        quiet_s, still_s, waiting_s: for how long the job had been quiet and still, and ranks had waited, when a limit
            was reached.
    """

    answers: dict[int, WorkersExamined] = field(default_factory=dict)
    quiet_s: float = 0.0
    still_s: float = 0.0
    waiting_s: float = 0.0

    @functools.cached_property
    def ranks(self) -> list[RankEvidence]:
        """Of all nodes, in any thread; to be read when no answer is taken any more."""
        return [rank for answer in self.answers.values() for rank in unfolded(answer.ranks)]

    @property
    def nodes(self) -> list[NodeEvidence]:
        """Those where NCCL and the GPUs were asked."""
        return [answer.node for answer in self.answers.values() if answer.node]

    def explained(self, *, output_counts: bool = True) -> Explanation:
        """What the answers say; without ``output_counts`` also of ranks that write output."""
        from ddplaunch.features.hangs.explanation import explain, explain_waiting, with_gpus

        return with_gpus((explain if output_counts else explain_waiting)(self.ranks), self.nodes)

    def write(self, folder: Path | None, found: Explanation, name: str = "hang") -> Path | None:
        """Write hang.txt and hang.json to the run's ``folder``; a later hang gets hang_2.txt, and so on.

        ``name``: in place of ``hang``, what the files are called.

        Returns the path of the text; None without a folder or answers, if the disk did not take it, or if there are
        ``_MAX_FILES`` already.
        """
        if not folder or not self.ranks:
            return None
        with _writing:
            ends = ("", *(f"_{number}" for number in range(2, _MAX_FILES + 1)))
            paths = (folder / f"{name}{end}.txt" for end in ends)
            text = next((path for path in paths if not os.path.lexists(path)), None)
            if text:
                with kept_files.noting(text):
                    kept_files.write_whole(text.with_suffix(".json"), _json(self, found))
                    kept_files.write_whole(text, page(self, found))
                    return text
        return None


def tell(messages: UserMessages, found: Explanation, first: str, level: int, kind: str = "message") -> None:
    """Show the line ``first``, which is about an event of this ``kind``, and below it what has been found."""
    messages.show(first, level, kind)
    for sentence in found.sentences:
        messages.show(f"  {sentence}", level)


# The files.

SCHEMA = 1
"""Version of the fields of hang.json."""

_MAX_FILES = 100
_writing = threading.Lock()
"""Two threads must not choose the same names."""


def _json(examination: Examination, found: Explanation) -> Iterator[str]:
    """A line for each fact, rank and node. ``indent`` takes five times as long: minutes for thousands of ranks.

    Ranks are ``folded``: of thousands, stacks and calls are mostly equal.
    """
    facts = {
        "schema": SCHEMA,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "attempt": examination.attempt,
        **wire.to_json(found),
    }
    yield "{\n"
    yield from (f"{json.dumps(name)}: {json.dumps(fact)},\n" for name, fact in facts.items())
    for name, records in (("ranks", folded(examination.ranks)), ("nodes", examination.nodes)):
        yield f'"{name}": [\n'
        for number, record in enumerate(records):
            yield (",\n" if number else "") + json.dumps(wire.to_json(record))
        yield "\n],\n" if name == "ranks" else "\n]\n}\n"


def page(examination: Examination, found: Explanation) -> Iterator[str]:
    """The text of hang.txt: the explanation, each rank with its counters and Python stacks, GPUs and NCCL's RAS.

    Ranks with equal stacks and calls are named one after the other, before these.
    """
    head = f"attempt {examination.attempt}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}: {found.job_state.value}"
    yield from (f"{line}\n" for line in (head, "", *map(escape, found.sentences)))
    alike: defaultdict[object, list[RankEvidence]] = defaultdict(list)
    for evidence in sorted(examination.ranks, key=lambda each: each.rank):
        record = evidence.flight_record
        alike[_without_addresses(evidence.stacks), record and (id(record.made), record.groups)].append(evidence)
    for members in alike.values():
        lines = ["", *(line for each in members for line in _rank(each)), *_calls_and_stacks(members[0])]
        yield "\n".join(lines) + "\n"
    for node in examination.nodes:
        yield "\n".join(("", *_node(node))) + "\n"


def _rank(evidence: RankEvidence) -> list[str]:
    head = f"rank {evidence.rank} on {evidence.host}, pid {evidence.pid}"
    if not evidence.is_running:
        return [f"{head}: has ended"]
    little = "" if is_busy(evidence) else " (too little to count)"
    facts = [
        f"no output for {evidence.silent_s:.0f} s",
        f"in the last {evidence.window_s:.1f} s {evidence.cpu_s:.2f} s of CPU time and {evidence.io_bytes} bytes read "
        f"and written{little}, {evidence.run_queue_wait_s:.2f} s waiting for a CPU",
    ]
    facts += [evidence.blocked_state] if evidence.blocked_state else []
    facts += [f"busiest child: {evidence.busy_child}"] if evidence.busy_child else []
    facts += ["reads standard input"] if evidence.waits_for_input else []
    lines = [f"{head}: {'; '.join(facts)}", *(f"  not known: {missing}" for missing in evidence.missing_sources)]
    return [escape(line) for line in lines]


@functools.lru_cache(1024)
def _without_addresses(stacks: str) -> str:
    """Threads with equal stacks have other addresses in other processes."""
    return re.sub("0x[0-9a-f]+", "", stacks)


def _calls_and_stacks(evidence: RankEvidence) -> list[str]:
    lines, record = [], evidence.flight_record
    for call in record.made.all[-5:] if record else ():
        assert record
        done, group = "done" if call.is_done else "not done", record.group_name(call)
        lines.append(f"  {call.operation} #{call.number} of group {group}, sizes {call.input_sizes}: {done}")
    return [escape(line) for line in (*lines, *evidence.stacks.splitlines())]


def _node(node: NodeEvidence) -> list[str]:
    lines = [f"GPUs of {node.host}: {node.gpus_missing}" if node.gpus_missing else f"GPUs of {node.host}:"]
    for gpu in node.gpus:
        lines.append(
            f"  {gpu.index} {gpu.name} {gpu.uuid}: {gpu.utilization} % busy, memory {gpu.memory_utilization} %, "
            f"{gpu.power_w} of {gpu.power_limit_w} W {gpu.error}"
        )
    lines += [f"NCCL's RAS: {node.ras_missing}"] if node.ras_missing else []
    return [escape(line) for line in (*lines, *node.ras.splitlines())]


# Those that the user asks for.

_FIRST_NUMBER = 1 << 20
"""Those of ``HangWatch`` are smaller: it must not take these answers for its own."""

_MAX_SENTENCE, _MAX_WHERE, _MAX_PATH = 1000, 200, 4096


class RequestedExaminations(Watch):
    """Those that the user has asked for (``--stacks``), whatever the limits say, of one run.

    Requests that come during an examination share the next one. The answer is what the job does in sentences, and a
    line for the ranks that do the same. Decides nothing about the job: ``HangWatch`` does.
    """

    def __init__(self, run: RunServices) -> None:
        self._folder, self._send, self._number = run.folder, run.send_to_all, _FIRST_NUMBER
        self._each_node_has_launcher = run.config.each_node_has_launcher
        self._attempt = -1
        self._attempts: dict[int, int] = {}
        """By node: the attempt of its running workers. One may be in the next before the end of another's is read."""
        self._waiting: list[Reply] = []
        self._asking: list[Reply] = []
        """Those that wait for the next examination, and for the present one."""
        self._examination: Examination | None = None

    # Events.

    def on_request(self, request: Request, reply: Reply) -> bool:
        """A client asks; ``run_due`` begins the examination."""
        if not isinstance(request, ExamineRun):
            return False
        if not self._running:
            when = "have ended" if self._attempt >= 0 else "have not started"
            reply(RunExamined(sentences=(f"nothing to examine: the workers {when}",)))
        else:
            self._waiting.append(reply)
        return True

    def on_event(self, index: int, event: object) -> None:
        """The workers of node ``index`` have started or ended. Other events have no effect."""
        match event:
            case AttemptStarted(attempt=attempt):
                self._attempts[index], self._attempt = attempt, max(attempt, self._attempt)
            case AttemptEnded() | ChannelClosed():
                self._attempts.pop(index, None)

    def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
        """A node has examined its workers."""
        examination = self._examination
        if examination and isinstance(report, WorkersExamined) and examination.take(node_index, participants, report):
            self._conclude(examination)

    @property
    def _running(self) -> set[int]:
        """The nodes whose workers run in the newest attempt."""
        return {index for index, attempt in self._attempts.items() if attempt == self._attempt}

    def run_due(self, now: float) -> float:
        """Begin or end an examination. Returns when to call again."""
        if self._examination and now >= self._examination.deadline:
            self._conclude(self._examination)
        if self._waiting and not self._examination:
            self._begin(now)
        return self._examination.deadline if self._examination else NEVER

    # Examinations.

    def _begin(self, now: float) -> None:
        # Where each node has a launcher, the first answer says which nodes there are.
        expected = set() if self._each_node_has_launcher else set(self._running)
        self._number += 1
        self._asking, self._waiting = self._waiting, []
        self._examination = Examination(self._number, self._attempt, now + EXAMINATION_S, expected)
        self._send(ExamineWorkers(self._attempt, self._number, is_requested=True))

    def _conclude(self, examination: Examination) -> None:
        replies, self._asking, self._examination = self._asking, [], None
        folder = self._folder()

        def reply(answer: object) -> None:
            for each in replies:
                each(answer)

        refused: object = RequestRefused("what the workers do could not be explained")
        post_from_thread("stacks", lambda: _answer(examination, folder), reply, refused)


def _answer(examination: Examination, folder: Path | None) -> object:
    found = examination.explained()
    path = examination.write(folder, found, "stacks")
    return RunExamined(
        sentences=(*_sentences(examination.ranks, found), *_missing(examination)),
        lines=_lines(examination.ranks),
        path=quote(str(path), _MAX_PATH) if path else "",
        all_nodes_at=next((answer.all_nodes_at for answer in examination.answers.values()), ""),
    )


def _missing(examination: Examination) -> list[str]:
    count = len(examination.missing)
    if not count and examination.answers:
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
    alike = grouped((_line(evidence), evidence.rank) for evidence in evidences)
    groups = sorted(alike.items(), key=lambda item: min(item[1]))
    shown = [f"{ranks(members)}: {text}" for text, members in groups[: MAX_LINES - 1]]
    others = sum(len(members) for _, members in groups[MAX_LINES - 1 :])
    return tuple([*shown, f"{plural(others, 'more rank')} elsewhere"] if others else shown)


def _line(evidence: RankEvidence) -> str:
    state = rank_state(evidence).value
    parts = [state, f"at {quote(evidence.where, _MAX_WHERE)}" if evidence.where else "", evidence.blocked_state]
    return ", ".join(quote(part, _MAX_WHERE) for part in parts if part)
