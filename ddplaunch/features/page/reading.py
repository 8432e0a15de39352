"""Reads a run: the files of its folder, or, where each node has a launcher, of the folders of all as one run.

What is missing or damaged becomes a sentence. Never raises for the content of a file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddplaunch.features import declarations
from ddplaunch.features.runs import run_json
from ddplaunch.features.runs.run_json import Json, integer, number
from ddplaunch.features.usage.quantities import FOLDER
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.system.files import kept_files, run_folder
from ddplaunch.system.files.run_folder import RunFacts
from ddplaunch.text import escape, plural, ranks

if TYPE_CHECKING:
    from ddplaunch.protocol.results import AttemptResult

_Item = TypeVar("_Item")
_WORST_FIRST = ("failed", "stopped", "succeeded")
_MAX_BYTES = 256 << 20
_MAX_LINE = 1000
_CONTROL_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()][0-9A-Z])")


@dataclass
class RunFiles:
    """What a run folder has.

    Attributes:
        started: run.json.
        report: report.json; None if there is none yet, or if it cannot be read.
        events: the lines of events.jsonl, by time.
        usage: the files with usage samples, one for each node.
        is_live: a launcher holds the lock of the folder.
        launchers: the folders of the run's launchers; of the only one, ``folder`` itself.
        missing: what the page cannot show, and why; sentences.
        notes: what to know about this page; sentences.
    """

    folder: Path
    started: RunFacts
    report: RunResult | None
    events: list[Json]
    usage: list[Path]
    is_live: bool
    launchers: list[Path]
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def attempts(self) -> tuple[AttemptResult, ...]:
        """The attempts that have ended; empty without a report."""
        return self.report.attempts if self.report else ()


def read(folder: Path) -> RunFiles:
    """The files of the run in ``folder``."""
    if run_json.has_launchers(folder) and (parts := [_of_one(each) for each in run_json.of_launchers(folder)]):
        return _merged(folder, parts)
    files = _of_one(folder)
    if run_json.has_launchers(folder.parent):
        others = _ranks_without_events(files.events)
        run_id = line(files.started.run_id or folder.parent.name, 128)
        files.notes.append(
            f"Each node has a launcher: this page is about one{f', others have {others}' if others else ''}. "
            f"ddplaunch --page {run_id} makes one of all nodes whose folders are on this file system."
        )
    return files


def _of_one(folder: Path) -> RunFiles:
    """The files of the folder of one launcher."""
    missing: list[str] = []
    is_live = run_json.is_locked(folder)
    started = run_json.facts(folder)
    if not started.host:
        missing.append(_absent(folder / run_folder.RUN, "command and start are not known"))
    report = run_json.report(folder)
    if not report and not (is_live and not os.path.exists(folder / run_folder.REPORT)):
        missing.append(_absent(folder / run_folder.REPORT, "exit code and failures are not known"))
    events = _events(folder / run_json.EVENTS, missing)
    usage = _usage(folder)
    return RunFiles(folder, started, report, events, usage, is_live, [folder], missing)


def _absent(path: Path, effect: str) -> str:
    return f"{path.name} {'is damaged' if os.path.exists(path) else 'is missing'}: {effect}."


def _events(path: Path, missing: list[str]) -> list[Json]:
    if not os.path.exists(path):
        missing.append(f"{path.name} is missing: the times of attempts are those of the report.")
        return []
    found = list(run_json.lines(path))
    known = [each for each in found if each is not None]
    of_this_version = declarations("EVENTS")
    events = [
        each for each in known if run_json.text(each, "event") in of_this_version and number(each, "t") is not None
    ]
    if damaged := len(found) - len(known):
        missing.append(f"{path.name}: {plural(damaged, 'line')} cannot be read.")
    lost = sum(integer(event, "count") or 0 for event in events if event["event"] == "dropped")
    if lost:
        missing.append(f"{path.name}: {plural(lost, 'event')} could not be written.")
    return sorted(events, key=lambda event: float(event["t"]))


def _usage(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        files = [path for path in (folder / FOLDER).iterdir() if re.fullmatch(r"node_\d{1,9}\.jsonl", path.name)]
        return sorted(files, key=lambda path: int(path.stem.removeprefix("node_")))
    return []


def content(path: Path, limit: int = _MAX_BYTES) -> bytes:
    """The first ``limit`` bytes of a regular file; empty if it cannot be read, or if it is a link."""
    with contextlib.suppress(OSError, MemoryError), kept_files.open_regular(path, os.O_NOFOLLOW) as file:
        return file.read(limit)
    return b""


def last_part(path: Path, limit: int) -> bytes:
    """The whole lines in the last ``limit`` bytes of a regular file; empty if it cannot be read."""
    with contextlib.suppress(OSError, MemoryError), kept_files.open_regular(path, os.O_NOFOLLOW) as file:
        start = max(0, os.fstat(file.fileno()).st_size - limit)
        file.seek(start)
        data = file.read(limit)
        return data[data.find(b"\n") + 1 :] if start else data
    return b""


# Text of other processes.


def line(text: str, limit: int = _MAX_LINE) -> str:
    """``text`` on one line, without colours, other control characters escaped, cut after ``limit`` characters."""
    return block(text.replace("\n", " ").replace("\t", " "), limit, limit)


def block(text: str, limit: int = 20_000, columns: int = _MAX_LINE) -> str:
    """As ``line``, with its lines kept; of a text over ``limit`` characters the middle is left out."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
    lines = (_CONTROL_SEQUENCE.sub("", each.rstrip("\r")) for each in text.split("\n"))
    return "\n".join(escape(each if len(each) <= columns else f"{each[:columns]} ...") for each in lines)


# All launchers of a run as one. Times stay those of each launcher's clock; what several launchers say alike is kept
# once.


def _merged(folder: Path, parts: Sequence[RunFiles]) -> RunFiles:
    _tell_apart(parts)
    events = _merged_events(parts)
    files = RunFiles(
        folder=folder,
        started=next((part.started for part in parts if part.started.host), RunFacts()),
        report=_merged_report([part.report for part in parts if part.report]),
        events=events,
        usage=[path for part in parts for path in part.usage],
        is_live=any(part.is_live and not part.report for part in parts),
        launchers=[part.folder for part in parts],
        missing=[f"{part.folder.name}: {text}" for part in parts for text in part.missing],
        notes=[f"{plural(len(parts), 'launcher')} made this run. The times of each are by its own machine's clock."],
    )
    if missing := _ranks_without_events(events):
        files.missing.append(f"There is no folder with the events of {missing}.")
    if files.is_live:  # Some launchers may have ended.
        files.report = None
        files.events = [event for event in events if event["event"] != "run_ended"]
    return files


def _ranks_without_events(events: Sequence[Json]) -> str:
    """The ranks of the last attempt that no launcher here has started, as ``ranks 4-5``; empty if there are none."""
    starts = list(run_json.starts(events))
    last = max((attempt for _, attempt, _ in starts), default=0)
    of_last = [(event, started) for event, attempt, started in starts if attempt == last]
    world_size = max((integer(event, "world_size") or 0 for event, _ in of_last), default=0)
    missing = set(range(min(world_size, 100_000))).difference(*(started for _, started in of_last))
    return ranks(missing) if missing else ""


# Launchers that share a host: each has the name of its folder in place of the host's.


def _tell_apart(parts: Sequence[RunFiles]) -> None:
    hosts = Counter(map(_host, parts))
    for part in parts:
        host, name = _host(part), part.folder.name
        if host and hosts[host] > 1:
            part.events = [{**event, "host": name} if event.get("host") == host else event for event in part.events]
            part.report = part.report and _renamed(part.report, host, name)


def _host(part: RunFiles) -> str:
    return next((host for event in part.events if (host := run_json.text(event, "host"))), "")


def _renamed(report: RunResult, host: str, name: str) -> RunResult:
    """``name`` in place of ``host``; a first failure of another launcher's worker keeps its host."""

    def named(items: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(replace(each, host=name) if each.host == host else each for each in items)

    first = report.first_failure
    return replace(
        report,
        attempts=tuple(replace(attempt, exits=named(attempt.exits)) for attempt in report.attempts),
        first_failure=named([first])[0] if first and _has_first_failure(report) else first,
        hosts=named(report.hosts),
        collectives=named(report.collectives),
        health=named(report.health),
    )


# Their events.


def _merged_events(parts: Sequence[RunFiles]) -> list[Json]:
    """The events of all launchers, by time. What only one of them says, and is about no host, gets its name."""
    found = sorted(
        ((float(event["t"]), index, key, event) for index, part in enumerate(parts) for key, event in _keyed(part)),
        key=lambda item: item[:2],
    )
    launchers = Counter(key for _, _, key, _ in found)
    kept: list[Json] = []
    seen: set[str] = set()
    quiet: set[int] = set()
    for _, index, key, event in found:
        if event["event"] in ("quiet", "active"):
            before = len(quiet)
            (quiet.add if event["event"] == "quiet" else quiet.discard)(index)
            if before != len(quiet) and len(parts) in (before, len(quiet)):  # The job is quiet while all nodes are.
                kept.append(event)
        elif key not in seen:
            seen.add(key)
            is_of_one = launchers[key] == 1 and len(parts) > 1
            kept.append({"host": parts[index].folder.name, **event} if is_of_one else event)
    return kept


def _keyed(part: RunFiles) -> Iterable[tuple[str, Json]]:
    """Each event with what it says, and how often this launcher has said it before."""
    said: Counter[str] = Counter()
    for event in part.events:
        what = repr(sorted((key, each) for key, each in event.items() if key not in ("t", "node", "s")))
        said[what] += 1
        yield f"{said[what]} {what}", event


# Their reports.


def _merged_report(found: Sequence[RunResult]) -> RunResult | None:
    """One report: the worst outcome, the workers of all nodes, and each finding once; None if there is none."""
    if not found:
        return None
    worst = min(found, key=lambda report: (_WORST_FIRST.index(report.outcome), not _has_first_failure(report)))
    first = next(filter(_has_first_failure, found), worst)
    return replace(
        worst,
        start="",
        end="",
        first_failure=first.first_failure,
        attempts=_merged_attempts(found),
        hosts=tuple(each for report in found for each in report.hosts),
        collectives=_once(found, lambda report: report.collectives, lambda each: each.rank),
        health=_once(found, lambda report: report.health, lambda each: (each.host, each.gpu, each.rule)),
    )


def _has_first_failure(report: RunResult) -> bool:
    """Whether the first failure is that of a worker of this launcher."""
    first, exits = report.first_failure, report.attempts[-1].exits if report.attempts else ()
    return first is not None and any(each.rank == first.rank for each in exits)


def _merged_attempts(found: Sequence[RunResult]) -> tuple[AttemptResult, ...]:
    merged: dict[int, AttemptResult] = {}
    for attempt in (attempt for report in found for attempt in report.attempts):
        known = merged.setdefault(attempt.attempt, replace(attempt, exits=(), collectives=()))
        merged[attempt.attempt] = replace(
            known,
            reason=known.reason or attempt.reason,
            exits=known.exits + attempt.exits,
            collectives=known.collectives + attempt.collectives,
        )
    return tuple(merged.values())


def _once(
    found: Sequence[RunResult], items: Callable[[RunResult], tuple[_Item, ...]], what: Callable[[_Item], object]
) -> tuple[_Item, ...]:
    return tuple({what(each): each for report in reversed(found) for each in items(report)}.values())
