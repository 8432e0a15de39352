"""What happened when, from events.jsonl and report.json: attempts, ends of ranks, moments, and where the time went.

Pure. Reports of older versions, and folders without events, give what they have.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.page.reading import RunFiles, line
from ddplaunch.features.runs import run_json
from ddplaunch.features.runs.run_json import Json, integer, number
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.display.failure_page import is_victim
from ddplaunch.protocol import first_failure
from ddplaunch.text import plural

if TYPE_CHECKING:
    from ddplaunch.protocol.results import WorkerExit

MARKS = {
    "checkpoint_suspect": "health",
    "worker_failed": "failed",  # Or ``VICTIM``.
    "node_lost": "lost",
    "hang_reported": "hang",
    "hang_aborted": "hang",
    "moves_again": "go",
    "health": "health",
    "slow_rank": "slow",
    "signal": "stop",
    "restart": "restart",
    "node_joined": "joined",
    "run_ended": "end",
}
"""Kinds of events with a mark on the time axis, and the mark."""

VICTIM = "victim"
"""In place of ``failed``, for bars and marks: a rank that has lost a peer, because another one failed."""

_FOLDED = {
    "agent_connected": "connected to {}",
    "agent_ready": "ready: {}",
    "attempt_started": "the workers run: {}",
    "attempt_ended": "the workers have ended: {}",
}
"""Events of nodes that become one moment for all nodes."""

_MAX_MOMENTS = 400
_MAX_FAILURES = 20
_MAX_MISSED = 50


@dataclass(frozen=True)
class Span:
    """From ``start`` to ``end``, in seconds since 1970."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return max(0.0, self.end - self.start)

    def common(self, other: Span) -> float:
        """Seconds in which both are."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


@dataclass(frozen=True)
class RankBar:
    """A rank in an attempt: from its start until it ended, and how.

    Attributes:
        end: ``ok``, ``failed``, ``VICTIM``, ``stopped``, ``lost`` with its node, or ``open``: it runs, or its end is
            not known.
    """

    rank: int
    attempt: int
    span: Span
    end: str


@dataclass(frozen=True)
class Moment:
    """Something that happened; ``mark`` is its sign on the time axis, empty if it has none."""

    time_s: float
    kind: str
    where: str
    text: str
    mark: str = ""


@dataclass
class Story:
    """A run on the launcher's clock.

    Attributes:
        ready_s: when the last agent was ready before the first attempt; None if it is not known.
        attempts: when all workers of each attempt ran.
        quiet: when no worker wrote output or called a collective.
        nodes: by host, the bars of the node's ranks.
        left_out: moments that are not listed, because they are too many.
        lost_s: seconds of attempts whose work no checkpoint has; None: it is not known.
        waited_s: seconds for which the run has waited for GPUs.
    """

    whole: Span
    ready_s: float | None
    import_s: float
    attempts: list[Span]
    quiet: list[Span]
    nodes: dict[str, list[RankBar]]
    moments: list[Moment]
    left_out: int = 0
    lost_s: float | None = None
    waited_s: float = 0.0


def story(files: RunFiles, now_s: float) -> Story:
    """The story of this run; ``now_s``: the present, for a run that goes on."""
    events = files.events
    whole = _whole(files, now_s)
    of_attempts = _attempts(files, whole)
    first_s = min((span.start for span in of_attempts.values()), default=whole.end)
    ready = [float(event["t"]) for event in events if event["event"] == "agent_ready" and event["t"] <= first_s]
    imports = [number(event, "import_s") or 0.0 for event in events if event["event"] == "attempt_started"]
    moments = list(_moments(events, _victims(files)))
    kept = _kept(moments)
    return Story(
        whole=whole,
        ready_s=max(ready, default=None),
        import_s=max(imports, default=0.0),
        attempts=[of_attempts[number] for number in sorted(of_attempts)],
        quiet=_quiet(events, whole.end),
        nodes=_nodes(files, of_attempts, whole.end),
        moments=kept,
        left_out=len(moments) - len(kept),
        lost_s=_lost_s(events),
        waited_s=_waited_s(events, whole.end),
    )


def _waited_s(events: Sequence[Json], end_s: float) -> float:
    """Up to the end, if the run has got no GPUs."""
    begun, taken = ([float(e["t"]) for e in events if e["event"] == kind] for kind in ("gpus_awaited", "gpus_taken"))
    return max(0.0, min([*taken, end_s]) - begun[0]) if begun else 0.0


def _lost_s(events: Sequence[Json]) -> float | None:
    kinds = ("checkpoint", "work_lost")
    known = [number(event, "s") or 0.0 for event in events if event["event"] in kinds]
    return sum(known) if known else None


def _whole(files: RunFiles, now_s: float) -> Span:
    times = [float(event["t"]) for event in files.events]
    report = files.report
    start = run_json.seconds((report and report.start) or files.started.start)
    start = min([*times[:1], *([start] if start is not None else [])], default=now_s)
    end = run_json.seconds(report.end) if report else None
    if end is None:
        known = now_s if files.is_live else max([*times, start])
        end = start + report.duration_s if report and len(files.launchers) == 1 else known
    return Span(start, max(start, end))


# Attempts.


def _attempts(files: RunFiles, whole: Span) -> dict[int, Span]:
    found: dict[int, Span] = {}
    for event in files.events:
        attempt = integer(event, "attempt")
        if attempt is None or event["event"] not in ("attempt_started", "attempt_ended"):
            continue
        time_s, known = float(event["t"]), found.get(attempt)
        if event["event"] == "attempt_started":
            found[attempt] = Span(max(time_s, known.start if known else time_s), whole.end)
        elif known:
            found[attempt] = Span(known.start, time_s)
    ended = {integer(event, "attempt") for event in files.events if event["event"] == "attempt_ended"}
    for attempt in found:  # One whose end is not known has ended before the next one.
        if attempt not in ended and attempt + 1 in found:
            found[attempt] = Span(found[attempt].start, found[attempt + 1].start)
    return found or _reported_attempts(files, whole)


def _reported_attempts(files: RunFiles, whole: Span) -> dict[int, Span]:
    """Without events: by the clocks of the hosts on which the workers ran."""
    found = {}
    for attempt in files.attempts:
        if attempt.exits:
            start = max(min(each.time_s - each.duration_s for each in attempt.exits), whole.start)
            end = min(max(each.time_s for each in attempt.exits), whole.end)
            found[attempt.attempt] = Span(start, end)
    return found


def _quiet(events: Sequence[Json], end_s: float) -> list[Span]:
    spans: list[Span] = []
    since: float | None = None
    for event in events:
        if event["event"] == "quiet" and since is None:
            since = float(event["t"])
        elif event["event"] == "active" and since is not None:
            spans.append(Span(since, float(event["t"])))
            since = None
    return [*spans, *([Span(since, end_s)] if since is not None else [])]


# Nodes and ranks.


def _victims(files: RunFiles) -> set[tuple[int, int]]:
    """Attempt and rank of the workers that have failed for lack of a peer."""
    firsts = [attempt.cause or first_failure.first_failure(attempt.exits) for attempt in files.attempts]
    return {
        (attempt.attempt, each.rank)
        for attempt, first in zip(files.attempts, firsts, strict=True)
        for each in first_failure.failures(attempt.exits)
        if is_victim(each, first)
    }


def _nodes(files: RunFiles, attempts: dict[int, Span], end_s: float) -> dict[str, list[RankBar]]:
    nodes: dict[str, list[RankBar]] = {}
    exits = {(attempt.attempt, each.rank): each for attempt in files.attempts for each in attempt.exits}
    victims = _victims(files)
    lost = {run_json.text(event, "host"): float(event["t"]) for event in files.events if event["event"] == "node_lost"}
    for event, attempt, ranks in run_json.starts(files.events):
        known = attempts[attempt].end if attempt in attempts else end_s
        start, lost_s = float(event["t"]), lost.get(run_json.text(event, "host"), -1.0)
        is_lost = start <= lost_s <= known
        span = Span(start, lost_s if is_lost else max(start, known))
        bars = nodes.setdefault(line(run_json.text(event, "host"), 64), [])
        bars += [_bar(rank, attempt, span, exits.get((attempt, rank)), "lost" if is_lost else "open") for rank in ranks]
    for host, bars in (nodes := nodes or _reported_nodes(exits, attempts)).items():
        nodes[host] = [replace(bar, end=VICTIM) if (bar.attempt, bar.rank) in victims else bar for bar in bars]
    found = nodes.items()
    return dict(sorted(found, key=lambda node: min(((bar.attempt, bar.rank) for bar in node[1]), default=(0, 0))))


def _reported_nodes(exits: dict[tuple[int, int], WorkerExit], attempts: dict[int, Span]) -> dict[str, list[RankBar]]:
    """Without events: the nodes of the workers that have ended."""
    nodes: dict[str, list[RankBar]] = {}
    for (attempt, rank), each in exits.items():
        if attempt in attempts:
            nodes.setdefault(line(each.host, 64), []).append(_bar(rank, attempt, attempts[attempt], each))
    return nodes


def _bar(rank: int, attempt: int, span: Span, exit_: WorkerExit | None, without: str = "open") -> RankBar:
    """``without``: how it ended if its exit is not known."""
    if exit_ is None:
        return RankBar(rank, attempt, span, without)
    how = "stopped" if exit_.stopped else "ok" if exit_.returncode == 0 else "failed"
    return RankBar(rank, attempt, Span(span.start, min(span.end, span.start + exit_.duration_s)), how)


# Moments.


def _moments(events: Sequence[Json], victims: set[tuple[int, int]]) -> Iterator[Moment]:
    folded: dict[tuple[str, int | None], list[Json]] = {}
    failures: Counter[int | None] = Counter()
    told: set[str] = set()
    for event in events:
        kind, attempt = str(event["event"]), integer(event, "attempt")
        if kind in _FOLDED:
            folded.setdefault((kind, attempt), []).append(event)
        elif kind not in ("dropped", "limit", "first_output", "node_left", "active"):
            failures[attempt] += kind == "worker_failed"
            if kind != "worker_failed" or failures[attempt] <= _MAX_FAILURES:
                moment = _moment(event, told)
                is_victim_ = (attempt, integer(event, "rank")) in victims and kind == "worker_failed"
                yield replace(moment, mark=VICTIM) if is_victim_ else moment
                told.add(moment.text)
    for (kind, attempt), group in folded.items():
        yield _folded(kind, attempt, group)
    for event in next(([each] for each in events if each["event"] == "first_output"), []):
        yield Moment(float(event["t"]), "first output", _where(event), "the first output of a worker has arrived")


def _moment(event: Json, told: set[str]) -> Moment:
    """``told``: texts of earlier moments, which the end of the run does not repeat."""
    kind = str(event["event"])
    text = line(run_json.text(event, "text"))
    if kind == "quiet":
        text = "no output and no collective from here on"
    elif kind == "node_joined" and not text:
        text = f"ready to take part: {plural(integer(event, 'workers') or 0, 'worker')}"
    elif kind == "run_ended":
        text = f"{line(run_json.text(event, 'outcome'), 20)}{f': {text}' if text and text not in told else ''}"
    return Moment(float(event["t"]), kind.replace("_", " "), _where(event), text, MARKS.get(kind, ""))


def _where(event: Json) -> str:
    host, rank, gpu = line(run_json.text(event, "host"), 64), integer(event, "rank"), integer(event, "gpu")
    parts = [host, "" if rank is None else f"rank {rank}", "" if gpu is None else f"GPU {gpu}"]
    return " ".join(filter(None, parts))


def _folded(kind: str, attempt: int | None, group: Sequence[Json]) -> Moment:
    hosts = list(dict.fromkeys(line(run_json.text(event, "host"), 64) for event in group))
    workers = sum(integer(event, "workers") or 0 for event in group)
    who = hosts[0] if len(hosts) == 1 else plural(len(hosts), "node")
    count = f", {plural(workers, 'worker')}" if workers else ""
    text = _FOLDED[kind].format(f"{who}{count}")
    text = f"attempt {attempt}: {text}" if attempt is not None else text
    return Moment(float(group[-1]["t"]), kind.replace("_", " "), hosts[0] if len(hosts) == 1 else "", text)


def _kept(moments: Sequence[Moment]) -> list[Moment]:
    """By time; of too many, those with a mark first, and of these the earliest and the latest."""
    marked = [moment for moment in moments if moment.mark]
    if len(marked) > _MAX_MOMENTS:
        marked = [*marked[: _MAX_MOMENTS - _MAX_MISSED], *marked[-_MAX_MISSED:]]
    others = [moment for moment in moments if not moment.mark][: _MAX_MOMENTS - len(marked)]
    return sorted([*marked, *others], key=lambda moment: moment.time_s)


# Where the time went.

USES = {
    "wait": "until GPUs were free, with --wait-for-gpus",
    "connect": "until all agents were ready",
    "import": "importing torch before the first worker",
    "rendezvous": "until the nodes had met and all workers ran",
    "run": "workers ran, and wrote output or called collectives",
    "lost": "workers ran, and their work was lost, since no checkpoint has it; with --checkpoint",
    "silent": "workers ran, without output and collectives for a minute or more",
    "between attempts": "from the end of an attempt until the next one ran",
    "end": "after the last attempt: logs and report",
}


def time_uses(told: Story) -> dict[str, float]:
    """Seconds of the uses that took any time."""
    whole, attempts = told.whole, told.attempts
    first = attempts[0].start if attempts else whole.end
    waited = min(told.waited_s, first - whole.start)
    ready = min(max(whole.start + waited, told.ready_s if told.ready_s is not None else whole.start), first)
    imported = min(told.import_s, first - ready)
    silent = sum(attempt.common(each) for attempt in attempts for each in told.quiet)
    ran = sum(attempt.length for attempt in attempts) - silent
    lost = min(told.lost_s or 0.0, ran)
    lengths = {
        "wait": waited,
        "connect": ready - whole.start - waited,
        "import": imported,
        "rendezvous": first - ready - imported,
        "run": ran - lost,
        "lost": lost,
        "silent": silent,
        "between attempts": sum(max(0.0, after.start - before.end) for before, after in itertools.pairwise(attempts)),
        "end": max(0.0, whole.end - attempts[-1].end) if attempts else 0.0,
    }
    return {name: length for name, length in lengths.items() if length > 0}
