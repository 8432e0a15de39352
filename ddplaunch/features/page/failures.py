"""What the page says of failures, slow ranks, hardware and hosts, from report.json and the texts of a run folder.

Text of workers loses its control characters here; the template escapes it for HTML.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold
from ddplaunch.features.page import output
from ddplaunch.features.page.reading import RunFiles, block, content, line
from ddplaunch.features.runs import run_json
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.display.failure_page import failure_line, how, is_victim
from ddplaunch.protocol.results import NO_RESTARTS_ALLOWED, AttemptResult, WorkerExit
from ddplaunch.system.files.run_folder import FAILURE_PAGE
from ddplaunch.text import clock, duration, fold_ints, grouped

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.protocol.run_result import RunResult

_MAX_OTHERS = 16
_MAX_TEXT, _OTHERS = 30_000, 0.2
"""Characters of a text; of the failures that follow the first, this share."""

_MAX_HANGS, _MAX_TEXTS = 3, 6
_TRACEBACK = "Traceback (most recent call last):"
_REMARK = r"^(before|then|stopped|logs?|hint|left): +(\S.*)$"
"""Of report.txt."""

_MAX_ROWS = 16


@dataclass(frozen=True)
class Failure:
    """A failed worker.

    Attributes:
        who: its rank and host.
        title: the same, and why it has failed.
        tail: its last lines, up to its traceback.
        links: name and address of its log files.
        is_victim: it has failed for lack of a peer.
    """

    who: str
    title: str
    facts: str
    traceback: str
    tail: str
    links: Sequence[tuple[str, str]] = ()
    is_victim: bool = False


def of_run(files: RunFiles, share: float = 1.0) -> tuple[list[Failure], int]:
    """The failed workers of the last attempt, the first failure first; and how many are left out.

    ``share``: of the usual length of texts.
    """
    if not files.report:
        found = [each for folder in files.launchers for each in _from_folder(folder / "failed", share)]
        return found[: _MAX_OTHERS + 1], max(0, len(found) - _MAX_OTHERS - 1)
    first = files.report.first_failure
    exits = files.attempts[-1].exits if files.attempts else ()
    failed = [each for each in exits if each.returncode and not each.stopped and (not first or each.rank != first.rank)]
    shown = [*([first] if first else []), *failed]
    texts = [
        _failure(files, each, share * (1.0 if index == 0 else _OTHERS), first)
        for index, each in enumerate(shown[: _MAX_OTHERS + 1])
    ]
    return texts, max(0, len(shown) - _MAX_OTHERS - 1)


def _from_folder(folder: Path, share: float) -> Iterator[Failure]:
    """Without a report: what ``failed/rank_N`` has, which is written before it."""
    limit = int(_MAX_TEXT * share)
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if match := re.fullmatch(r"rank_(\d{1,7})", path.name):
                tail = content(path / "last_lines.log", _MAX_TEXT).decode("utf-8", "replace").rstrip("\n")
                error = (run_json.read(path / "error.json") or {}).get("message")
                details = error if isinstance(error, dict) else {}
                extra = details.get("extraInfo")
                message = run_json.text(details, "message").strip()
                traceback = run_json.text(extra, "py_callstack") if isinstance(extra, dict) else ""
                why = f": {line(message.splitlines()[0], 600)}" if message else ""
                who = f"rank {int(match[1])}"
                text = block(traceback or message, limit)
                yield Failure(who, f"{who} failed{why}", "", text, block(_before_traceback(tail, text), limit))


def _before_traceback(tail: str, traceback: str) -> str:
    """The last lines without the traceback that is shown anyway."""
    return tail.partition(_TRACEBACK)[0].rpartition("\n")[0] if traceback and _TRACEBACK in tail else tail


def _failure(files: RunFiles, exit_: WorkerExit, share: float, first: WorkerExit | None) -> Failure:
    facts = [
        f"at {clock(exit_.time_s)} by its host's clock" if exit_.time_s else "",
        f"ran for {duration(exit_.duration_s)}",
        how(exit_),
        f"local rank {exit_.local_rank}",
        f"pid {exit_.pid}" if exit_.pid else "",
        line(exit_.log_file or "", 400),
    ]
    text = (exit_.error.traceback or exit_.error.message) if exit_.error else ""
    limit = int(_MAX_TEXT * share)
    return Failure(
        line(f"rank {exit_.rank} on {exit_.host}", 300),
        line(failure_line(exit_), 700),
        " · ".join(filter(None, facts)),
        block(text, limit),
        block(_before_traceback("\n".join(exit_.tail), text), limit),
        output.of_worker(files, exit_.host, files.attempts[-1].attempt if files.attempts else 0, exit_.local_rank),
        is_victim(exit_, first) and exit_ is not first,
    )


def sentences(files: RunFiles) -> list[str]:
    """Why attempts ended, and where ranks waited, where no worker's failure says it; and why no restart followed."""
    found = [files.report.reason if files.report else ""]
    for attempt in files.attempts:
        found += [attempt.reason, *attempt.collectives, _why_no_restart(attempt)]
    return list(dict.fromkeys(line(text) for text in found if text))[:20]


def _why_no_restart(attempt: AttemptResult) -> str:
    """Also after a success or a restart ``decision`` has a text, which says nothing new."""
    is_told = attempt.decision == NO_RESTARTS_ALLOWED or attempt.outcome != "failed" or attempt.attempt_follows
    return "" if is_told else attempt.decision


def remarks(files: RunFiles) -> list[tuple[str, str]]:
    """What the failure page says besides the failure: who failed as a consequence, where the logs are, the hint, ...

    Word and text of each, as report.txt has them; of the first launcher that has one.
    """
    for folder in files.launchers:
        text = content(folder / FAILURE_PAGE, 1 << 20).decode("utf-8", "replace")
        if found := re.findall(_REMARK, text, re.MULTILINE):
            return [(line(word), line(rest)) for word, rest in found[:_MAX_ROWS]]
    return []


def texts(files: RunFiles, share: float = 1.0, *, with_page: bool = True) -> list[tuple[str, str]]:
    """Name and text of report.txt and of the reports of hangs; of several launchers, of the first that have some.

    ``share``: of the usual length of texts. ``with_page``: report.txt, too, of which else all is told.
    """
    found: list[tuple[str, str]] = []
    for folder in files.launchers:
        of_folder = [(name, body) for name, body in _texts(folder) if with_page or name != FAILURE_PAGE]
        if len(found) + len(of_folder) <= _MAX_TEXTS:
            before = "" if folder == files.folder else f"{folder.name}/"
            found += [(line(f"{before}{name}", 200), block(body, int(_MAX_TEXT * share))) for name, body in of_folder]
    return found


def _texts(folder: Path) -> list[tuple[str, str]]:
    with contextlib.suppress(OSError):
        hangs = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"hang(_\d{1,2})?\.txt", path.name))
        names = [FAILURE_PAGE, *hangs[:_MAX_HANGS]]
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


def slow_ranks(report: RunResult) -> Table:
    """The ranks for which the others waited, the most expensive first."""
    rows = [
        (
            str(each.rank),
            line(each.host, 64),
            f"{each.cost_share * 100:.1f} %",
            f"{each.last} of {each.delayed}",
            f"{each.median_s * 1000:.1f} ms",
            f"{each.p95_s * 1000:.1f} ms",
            line(each.warning, 400),
        )
        for each in report.collectives[:_MAX_ROWS]
    ]
    head = ("rank", "host", "cost", "last in delayed collectives", "median", "95 %", "")
    return Table(head, rows, frozenset({0, 2, 3, 4, 5}), max(0, len(report.collectives) - _MAX_ROWS))


def health(report: RunResult) -> Table:
    """What was wrong with the hardware."""
    rows = [
        (
            clock(each.time_s).partition(".")[0],
            line(each.host, 64),
            "" if each.gpu is None else str(each.gpu),
            fold_ints(each.ranks),
            line(each.rule, 64),
            line(each.text, 400),
            line(each.action, 400),
        )
        for each in report.health[: 4 * _MAX_ROWS]
    ]
    head = ("time", "host", "GPU", "ranks", "rule", "what", "what to do")
    return Table(head, rows, left_out=max(0, len(report.health) - 4 * _MAX_ROWS))


def hosts(report: RunResult) -> Table:
    """The nodes; those that are alike share a row."""
    alike = grouped(
        ((str(each.workers), str(each.cpus or "?"), _models(each.gpus)), line(each.host, 64)) for each in report.hosts
    )
    rows = [(fold(names), str(len(names)), *key) for key, names in alike.items()]
    head = ("hosts", "nodes", "workers each", "CPUs each", "GPUs each")
    return Table(head, rows[:_MAX_ROWS], frozenset({1, 2, 3}), max(0, len(rows) - _MAX_ROWS))


def _models(gpus: Sequence[str]) -> str:
    return ", ".join(f"{count} x {line(model, 64) or 'GPU'}" for model, count in Counter(gpus).items()) or "none"
