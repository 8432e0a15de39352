"""Reads what NCCL's RAS has sent: the communicators of a job, with the ranks that do not respond or differ.

Used where the answer is judged. Pure. The answer comes from a process of the user: what does not fit is left out, and
texts are escaped when they are shown. The formats are those of NCCL's ``src/ras/client_support.cc``.
"""

from __future__ import annotations

import json
import re
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_COMMUNICATORS = 4096
MAX_RANKS = 1 << 16
"""Of one communicator."""

_IN_PROGRESS = 7
"""``ncclInProgress``: not an error."""

_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
    8: "Timeout",
}
"""``ncclResult_t``, in the words of the text format."""


@dataclass(frozen=True, kw_only=True)
class RasRank:
    """One rank of a communicator. ``rank`` is its number there, which need not be the global rank.

    Attributes:
        host: its IP address; empty if unknown.
        pid: as its process sees it, 0 if unknown; in a container not that of the host.
        counts: how many collectives it has launched (not finished), by name, as in ``AllReduce``.
        error: its asynchronous error, or that of its initialisation; empty without one.
        is_missing: no data came from it. The others are then empty.
        is_unresponsive: its process did not respond, or is considered dead.
        is_dead: its process has not been reached for a minute.
    """

    rank: int
    host: str = ""
    pid: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    error: str = ""
    is_missing: bool = False
    is_unresponsive: bool = False
    is_dead: bool = False


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """``ranks`` are all ranks in JSON; in text only those that RAS names: missing, failed, or unlike the others."""

    hash: str
    size: int = 0
    ranks: tuple[RasRank, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RasReport:
    """The communicators of a job. ``names_all_ranks`` is false for the text format.

    ``silent_processes`` are (IP address, pid) of those that did not respond; only the text format names them apart.
    """

    nccl_version: str = ""
    names_all_ranks: bool = False
    communicators: tuple[Communicator, ...] = ()
    silent_processes: tuple[tuple[str, int], ...] = ()


def report(text: str) -> RasReport:
    """The report in the answer ``text``, as far as it can be read; an empty one if nothing can. Raises nothing."""
    try:
        return _from_json(json.loads(text)) if text.lstrip().startswith("{") else _from_text(text)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return RasReport()


# JSON, since NCCL 2.28.7.


def _from_json(body: dict[str, Any]) -> RasReport:
    found = [item for item in _list(body.get("communicators"), MAX_COMMUNICATORS) if isinstance(item, dict)]
    return RasReport(
        nccl_version=str(body.get("nccl_version", "")),
        names_all_ranks=True,
        communicators=tuple(map(_communicator, found)),
    )


def _communicator(body: dict[str, Any]) -> Communicator:
    present = [_present(item) for item in _list(body.get("ranks"), MAX_RANKS)]
    missing = [_missing(item) for item in _list(body.get("missing_ranks"), MAX_RANKS)]
    ranks = tuple(sorted(present + missing, key=lambda rank: rank.rank))
    return Communicator(hash=str(body.get("hash", "")), size=_count(body.get("size")), ranks=ranks)


def _present(body: dict[str, Any]) -> RasRank:
    status, counts = body.get("status", {}), body.get("collective_counts", {})
    error = _error(status.get("async_error")) or _error(status.get("init_state"))
    return RasRank(**_process(body), counts={str(name): _count(number) for name, number in counts.items()}, error=error)


def _missing(body: dict[str, Any]) -> RasRank:
    status = body.get("status", {})
    is_dead = status.get("considered_dead") is True
    is_unresponsive = is_dead or status.get("unresponsive") is True
    return RasRank(**_process(body), is_missing=True, is_unresponsive=is_unresponsive, is_dead=is_dead)


def _process(body: dict[str, Any]) -> dict[str, Any]:
    host = str(body.get("host", ""))
    return {
        "rank": _count(body.get("rank")),
        "host": "" if host == "unknown" else host,
        "pid": max(0, _count(body.get("pid"))),
    }


def _error(code: object) -> str:
    is_error = isinstance(code, int) and code not in (0, _IN_PROGRESS)
    return _ERRORS.get(_count(code), "Unexpected error") if is_error else ""


def _list(value: object, limit: int) -> list[Any]:
    return value[:limit] if isinstance(value, list) else []


def _count(value: object) -> int:
    return value if type(value) is int else 0


# Text.

_VERSION = re.compile(r"^NCCL version (\S+)", re.MULTILINE)
_GROUP = re.compile(r"^ *(\d+) +\d+ +\d+ +[\d-]+ +(\d+) +\d+ +[A-Z]+ +\S+", re.MULTILINE)
_SECTION = re.compile(r"^#(\d+)-\d+ \(([0-9a-f]+)\) (INCOMPLETE|ERROR|MISMATCH)$|^([A-Z]+)$")
_RANK = re.compile(r"^  Rank (\d+)(?: (.*?))? -- (?:GPU .* managed by process (\d+) on node (\S+)|\[)")
_SILENT = re.compile(r"^  Process (\d+) on node (\S+) managing GPU")
_COUNTED = re.compile(r"ranks have different (\w+) operation counts")
_LAUNCHED = re.compile(r"launched (?:up to operation (\d+)|any operations)")
_REPORTED = re.compile(r"reported (.+)")


def _from_text(text: str) -> RasReport:
    version = _VERSION.search(text)
    sizes = {number: int(size) for number, size in _GROUP.findall(text)}
    found: dict[tuple[str, str], dict[int, RasRank]] = {}
    silent: list[tuple[str, int]] = []
    for group, communicator_hash, kind, lines in _sections(text):
        if communicator_hash:
            ranks = found.setdefault((group, communicator_hash), {})
            _add_ranks(ranks, kind, lines)
        silent += [(match[2], int(match[1])) for match in map(_SILENT.match, lines) if match]
    return RasReport(
        nccl_version=version[1] if version else "",
        communicators=tuple(
            Communicator(hash=f"0x{name}", size=sizes.get(group, 0), ranks=tuple(sorted(ranks.values(), key=_number)))
            for (group, name), ranks in list(found.items())[:MAX_COMMUNICATORS]
        ),
        silent_processes=tuple(silent),
    )


def _number(rank: RasRank) -> int:
    return rank.rank


def _sections(text: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """The number of the group, the communicator's hash, the kind and the lines of each part of Errors and Warnings."""
    group = name = kind = ""
    lines: list[str] = []
    for line in text.splitlines():
        if match := _SECTION.match(line):
            yield group, name, kind, lines
            group, name, kind, lines = match[1] or "", match[2] or "", match[3] or match[4], []
        else:
            lines.append(line)
    yield group, name, kind, lines


def _add_ranks(ranks: dict[int, RasRank], kind: str, lines: list[str]) -> None:
    """Add what the lines say. Several ranks of one value follow a line with the value; a single one has it itself."""
    collective = value = ""
    for line in lines:
        match = _RANK.match(line)
        if counted := _COUNTED.search(line):
            collective = counted[1]
        elif match is None:
            value = line
        else:
            number = int(match[1])
            known = ranks.get(number) or RasRank(rank=number, host=match[4] or "", pid=int(match[3] or 0))
            ranks[number] = _with(known, kind, collective, match[2] or value)


def _with(rank: RasRank, kind: str, collective: str, value: str) -> RasRank:
    reported, launched = _REPORTED.search(value), _LAUNCHED.search(value)
    counts = {**rank.counts, collective: int(launched[1] or 0)} if launched and collective else rank.counts
    return RasRank(
        rank=rank.rank,
        host=rank.host,
        pid=rank.pid,
        counts=counts,
        error=reported[1] if kind == "ERROR" and reported else rank.error,
        is_missing=rank.is_missing or kind == "INCOMPLETE",
        is_unresponsive=rank.is_unresponsive or kind == "INCOMPLETE",
    )
