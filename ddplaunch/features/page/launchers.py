"""Reads a run: the folder of its only launcher, or, where every node has a launcher, the folders of all as one run.

Times stay those of each launcher's clock. What several launchers say alike is kept once. Never raises for the content
of a file.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from ddplaunch.features.page import reading
from ddplaunch.features.page.reading import RunFiles, line
from ddplaunch.system.files import run_folder, run_json
from ddplaunch.system.files.run_json import Json, dicts, integer
from ddplaunch.text import plural, ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

_WORST_FIRST = ("failed", "stopped", "succeeded")
_PER_LAUNCHER = ("start", "end", "duration_s")


def read(folder: Path) -> RunFiles:
    """The files of the run in ``folder``."""
    parts = [reading.read(each) for each in run_folder.of_launchers(folder)]
    if parts and os.path.isfile(folder / run_folder.NODES):
        return _merged(folder, parts)
    files = reading.read(folder)
    if os.path.isfile(folder.parent / run_folder.NODES):
        others = _ranks_without_events(files.events)
        run_id = line(run_json.text(files.started, "run_id") or folder.parent.name, 128)
        files.notes.append(
            f"Every node has its own launcher: this page is about one{f', others have {others}' if others else ''}. "
            f"ddplaunch --page {run_id} makes one of all nodes whose folders are on this file system."
        )
    return files


def _merged(folder: Path, parts: Sequence[RunFiles]) -> RunFiles:
    _tell_apart(parts)
    events = _events(parts)
    files = RunFiles(
        folder=folder,
        started=next((part.started for part in parts if part.started), {}),
        report=_report([part.report for part in parts if part.report]),
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
        files.report = {}
        files.events = [event for event in events if event["event"] != "run_ended"]
    return files


def _ranks_without_events(events: Sequence[Json]) -> str:
    """The ranks of the last attempt that no launcher here has started, as ``ranks 4-5``; empty if there are none."""
    starts = [event for event in events if event["event"] == "attempt_started"]
    attempt = max((integer(event, "attempt") or 0 for event in starts), default=0)
    missing: set[int] = set()
    for event in starts:
        if integer(event, "attempt") == attempt:
            missing |= set(range(min(integer(event, "world_size") or 0, 100_000)))
    for event in starts:
        first, workers = integer(event, "first_rank"), integer(event, "workers")
        if integer(event, "attempt") == attempt and first is not None and workers is not None:
            missing -= set(range(first, min(first + workers, 100_000)))
    return ranks(missing) if missing else ""


# Launchers that share a host: each has the name of its folder in place of the host's.


def _tell_apart(parts: Sequence[RunFiles]) -> None:
    hosts = Counter(map(_host, parts))
    for part in parts:
        host, name = _host(part), part.folder.name
        if host and hosts[host] > 1:
            first = part.report.get("first_failure")
            is_own = _has_first_failure(part.report)
            part.events = _renamed(part.events, host, name)
            part.report = _renamed(part.report, host, name)
            if not is_own and first:  # Of another launcher's worker.
                part.report["first_failure"] = first


def _host(part: RunFiles) -> str:
    return next((host for event in part.events if (host := run_json.text(event, "host"))), "")


def _renamed(value: Any, host: str, name: str) -> Any:
    if isinstance(value, list):
        return [_renamed(each, host, name) for each in value]
    if isinstance(value, dict):
        return {
            key: name if key == "host" and each == host else _renamed(each, host, name) for key, each in value.items()
        }
    return value


# Events.


def _events(parts: Sequence[RunFiles]) -> list[Json]:
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


# Reports.


def _report(found: Sequence[Json]) -> Json:
    """One report: the worst outcome, the workers of all nodes, and each finding once; empty if there is none."""
    if not found:
        return {}
    worst = min(found, key=lambda report: (_rank(report), not _has_first_failure(report)))
    first = next(filter(_has_first_failure, found), worst)
    return {
        **{key: value for key, value in worst.items() if key not in _PER_LAUNCHER},
        "first_failure": first.get("first_failure"),
        "attempts": _attempts(found),
        "hosts": [each for report in found for each in dicts(report, "hosts")],
        "collectives": _once(found, "collectives", lambda each: each.get("rank")),
        "health": _once(found, "health", lambda each: [each.get(key) for key in ("host", "gpu", "rule")]),
    }


def _rank(report: Json) -> int:
    outcome = report.get("outcome")
    return _WORST_FIRST.index(outcome) if outcome in _WORST_FIRST else len(_WORST_FIRST)


def _has_first_failure(report: Json) -> bool:
    """Whether the first failure is that of a worker of this launcher."""
    first, attempts = report.get("first_failure"), list(dicts(report, "attempts"))
    exits = dicts(attempts[-1], "exits") if attempts else ()
    return isinstance(first, dict) and any(each.get("rank") == first.get("rank") for each in exits)


def _attempts(found: Sequence[Json]) -> list[Json]:
    merged: dict[int | None, Json] = {}
    for attempt in (attempt for report in found for attempt in dicts(report, "attempts")):
        known = merged.setdefault(integer(attempt, "attempt"), {**attempt, "exits": [], "collectives": []})
        known["reason"] = known.get("reason") or attempt.get("reason")
        known["exits"] += dicts(attempt, "exits")
        known["collectives"] += run_json.words(attempt, "collectives")
    return list(merged.values())


def _once(found: Sequence[Json], key: str, what: Callable[[Json], object]) -> list[Json]:
    return list({repr(what(each)): each for report in reversed(found) for each in dicts(report, key)}.values())
