"""What the page says of failures, slow ranks, hardware and hosts, from report.json and the texts of a run folder.

Text of workers loses its control characters here; the template escapes it for HTML.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddplaunch.cluster.hostlist import fold
from ddplaunch.features.page.reading import (
    Json,
    block,
    content,
    dicts,
    integer,
    integers,
    line,
    number,
    words,
)
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure, stack_dump
from ddplaunch.protocol.results import NEVER_RESTARTED
from ddplaunch.system.files import run_json
from ddplaunch.text import clock, duration, fold_ints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddplaunch.features.page.reading import RunFiles

_MAX_OTHERS = 16
_MAX_TEXT, _OTHERS = 30_000, 0.2
"""Characters of a text; of the failures that follow the first, this share."""

_MAX_HANGS, _MAX_TEXTS = 3, 6
_MAX_ROWS = 16


@dataclass(frozen=True)
class Failure:
    """A failed worker."""

    title: str
    facts: str
    traceback: str
    tail: str


@dataclass(frozen=True)
class Text:
    """A file that is shown as it is."""

    name: str
    body: str


def of_run(files: RunFiles, share: float = 1.0) -> tuple[list[Failure], int]:
    """The failed workers of the last attempt, the first failure first; and how many are left out.

    ``share``: of the usual length of texts.
    """
    attempts = list(dicts(files.report, "attempts"))
    first = files.report.get("first_failure")
    first = first if isinstance(first, dict) else None
    exits = list(dicts(attempts[-1], "exits")) if attempts else []
    others = [each for each in exits if _has_failed(each) and (first is None or each.get("rank") != first.get("rank"))]
    found = [*([first] if first else []), *others]
    if not found and not files.report:
        found = [each for folder in files.launchers for each in _from_folder(folder / "failed")]
    texts = [
        _failure(each, share * (1.0 if index == 0 else _OTHERS)) for index, each in enumerate(found[: _MAX_OTHERS + 1])
    ]
    return texts, max(0, len(found) - _MAX_OTHERS - 1)


def _has_failed(exit_: Json) -> bool:
    code = integer(exit_, "returncode")
    return code is not None and code != 0 and exit_.get("stopped") is not True


def _from_folder(folder: Path) -> Iterator[Json]:
    """Without a report: what ``failed/rank_N`` has, which is written before it."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if match := re.fullmatch(r"rank_(\d{1,7})", path.name):
                tail = content(path / "last_lines.log", _MAX_TEXT).decode("utf-8", "replace").splitlines()
                error = (run_json.read(path / "error.json") or {}).get("message")
                details = error if isinstance(error, dict) else {}
                extra = details.get("extraInfo")
                traceback = run_json.text(extra, "py_callstack") if isinstance(extra, dict) else ""
                message = {"message": run_json.text(details, "message"), "traceback": traceback}
                yield {"rank": int(match[1]), "tail": tail, "error": message, "returncode": details.get("errorCode")}


def headline(exit_: Json) -> str:
    """A worker's failure in one line."""
    host = run_json.text(exit_, "host")
    who = f"rank {integer(exit_, 'rank')}" + (f" on {line(host, 64)}" if host else "")
    for key, verb in (("hardware", "failed"), ("give_up", "gave up"), ("avoid_node", "asked to avoid its node")):
        if reason := run_json.text(exit_, key):
            return f"{who} {verb}: {line(reason, 400)}"
    return f"{who} failed: {_reason(exit_)}"


def _reason(exit_: Json) -> str:
    error = exit_.get("error")
    message = run_json.text(error, "message").strip() if isinstance(error, dict) else ""
    if isinstance(error, dict) and message:
        at = stack_dump.raised_at(run_json.text(error, "traceback"))
        return line(message.splitlines()[0], 400) + (f" ({line(at, 200)})" if at else "")
    return _how(exit_)


def _how(exit_: Json) -> str:
    code = integer(exit_, "returncode")
    memory = exit_.get("out_of_memory")
    if memory in ("yes", "perhaps"):
        return f"SIGKILL, {first_failure.KILLED_FOR_MEMORY[memory]}"
    return first_failure.describe(code) if code is not None and abs(code) < 1 << 31 else "it is not known how"


def _failure(exit_: Json, share: float) -> Failure:
    error = exit_.get("error")
    body = error if isinstance(error, dict) else {}
    time_s, length = number(exit_, "time_s"), number(exit_, "duration_s")
    facts = [
        f"at {clock(time_s)} by its host's clock" if time_s else "",
        f"ran for {duration(length)}" if length is not None else "",
        _how(exit_),
        f"local rank {integer(exit_, 'local_rank')}" if integer(exit_, "local_rank") is not None else "",
        f"pid {integer(exit_, 'pid')}" if integer(exit_, "pid") else "",
        line(run_json.text(exit_, "log_file"), 400),
    ]
    text = run_json.text(body, "traceback") or run_json.text(body, "message")
    limit = int(_MAX_TEXT * share)
    tail = "\n".join(words(exit_, "tail"))
    return Failure(headline(exit_), " · ".join(filter(None, facts)), block(text, limit), block(tail, limit))


def sentences(files: RunFiles) -> list[str]:
    """Why attempts ended, and where ranks waited, where no worker's failure says it; and why no restart followed."""
    found = [run_json.text(files.report, "reason")]
    for attempt in dicts(files.report, "attempts"):
        found += [run_json.text(attempt, "reason"), *words(attempt, "collectives"), _why_no_restart(attempt)]
    return list(dict.fromkeys(line(text) for text in found if text))[:20]


def _why_no_restart(attempt: Json) -> str:
    """Also after a success or a restart ``decision`` has a text, which says nothing new."""
    decision = run_json.text(attempt, "decision")
    is_told = decision == NEVER_RESTARTED or attempt.get("outcome") != "failed" or attempt.get("attempt_follows")
    return "" if is_told else decision


def texts(files: RunFiles, share: float = 1.0) -> list[Text]:
    """report.txt, and the reports of hangs; of several launchers, those of the first that have some.

    ``share``: of the usual length of texts.
    """
    found: list[Text] = []
    for folder in files.launchers:
        of_folder = _texts(folder)
        if len(found) + len(of_folder) <= _MAX_TEXTS:
            before = "" if folder == files.folder else f"{folder.name}/"
            found += [
                Text(line(f"{before}{name}", 200), block(body, int(_MAX_TEXT * share))) for name, body in of_folder
            ]
    return found


def _texts(folder: Path) -> list[tuple[str, str]]:
    with contextlib.suppress(OSError):
        hangs = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"hang(_\d{1,2})?\.txt", path.name))
        names = ["report.txt", *hangs[:_MAX_HANGS]]
        bodies = [(name, content(folder / name, 4 << 20).decode("utf-8", "replace")) for name in names]
        return [(name, body) for name, body in bodies if body.strip()]
    return []


# Tables.


@dataclass(frozen=True)
class Table:
    """A table with the number of rows that it leaves out. ``numeric`` are the columns that are aligned right."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: frozenset[int] = frozenset()
    left_out: int = 0


def slow_ranks(report: Json) -> Table:
    """The ranks for which the others waited, the most expensive first."""
    found = list(dicts(report, "collectives"))
    rows = [
        (
            str(integer(each, "rank")),
            line(run_json.text(each, "host"), 64),
            f"{(number(each, 'cost_share') or 0) * 100:.1f} %",
            f"{integer(each, 'last') or 0} of {integer(each, 'delayed') or 0}",
            f"{(number(each, 'median_s') or 0) * 1000:.1f} ms",
            f"{(number(each, 'p95_s') or 0) * 1000:.1f} ms",
            line(run_json.text(each, "warning"), 400),
        )
        for each in found[:_MAX_ROWS]
    ]
    head = ("rank", "host", "cost", "last in delayed collectives", "median", "95 %", "")
    return Table(head, rows, frozenset({0, 2, 3, 4, 5}), max(0, len(found) - _MAX_ROWS))


def health(report: Json) -> Table:
    """What was wrong with the hardware."""
    found = list(dicts(report, "health"))
    rows = [
        (
            clock(number(each, "time_s") or 0.0).partition(".")[0],
            line(run_json.text(each, "host"), 64),
            "" if integer(each, "gpu") is None else str(integer(each, "gpu")),
            fold_ints(integers(each, "ranks")),
            line(run_json.text(each, "rule"), 64),
            line(run_json.text(each, "text"), 400),
            line(run_json.text(each, "action"), 400),
        )
        for each in found[: 4 * _MAX_ROWS]
    ]
    head = ("time", "host", "GPU", "ranks", "rule", "what", "what to do")
    return Table(head, rows, left_out=max(0, len(found) - 4 * _MAX_ROWS))


def hosts(report: Json) -> Table:
    """The nodes; those that are alike share a row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in dicts(report, "hosts"):
        gpus = words(each, "gpus")
        models = ", ".join(f"{gpus.count(model)} x {line(model, 64) or 'GPU'}" for model in dict.fromkeys(gpus))
        key = (str(integer(each, "workers") or 0), str(integer(each, "cpus") or "?"), models or "none")
        alike.setdefault(key, []).append(line(run_json.text(each, "host"), 64))
    rows = [(fold(names), str(len(names)), *key) for key, names in alike.items()]
    head = ("hosts", "nodes", "workers each", "CPUs each", "GPUs each")
    return Table(head, rows[:_MAX_ROWS], frozenset({1, 2, 3}), max(0, len(rows) - _MAX_ROWS))
