"""``--logs``: prints the log files of ranks, and follows them.

Runs in the process that the user started. It only reads files, so that no worker or agent ever waits for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.come_back.log_follower import LogFollower, pause, write_stdout
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.files import run_json
from ddplaunch.system.files.run_folders import find
from ddplaunch.text import fold_ints, quote, ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddplaunch.launcher.request import Request
    from ddplaunch.system.files.run_folders import RunFolder
    from ddplaunch.system.files.run_json import Json


_STREAMS = ("stdout", "stderr")
_POLL_S, _AGAIN_S = 0.1, 1.0
"""Seconds between two looks at the files, and at the run: whether it has ended, or another attempt has started."""

_NUMBERS = {"attempt": 1 << 30, "workers": 1 << 16, "first_rank": 1 << 30}
"""Keys of an event, and what their numbers are below."""


@dataclass(frozen=True)
class RankLogs:
    """The log files of one rank in one attempt.

    Attributes:
        folder: has the files, if they are on this machine; None if they are only on ``host``.
        subfolder: where they are in the run folder on ``host``.
        last_lines: the end of the output of a failed rank, which was sent to this machine; None if there is none.
    """

    rank: int
    host: str
    folder: Path | None
    subfolder: str
    last_lines: Path | None = None


@dataclass(frozen=True)
class _Asked:
    """What the user wants to see.

    Attributes:
        ranks: None: all.
        attempt: None: the last one.
        follows: also what is written from now on, until the run ends.
    """

    run_id: str
    ranks: Collection[int] | None = None
    attempt: int | None = None
    follows: bool = False


@dataclass
class _File:
    title: str
    reader: LogFollower


@dataclass
class _Output:
    """What was printed: a title stands before the first lines of a file, where there are several."""

    has_titles: bool = False
    _last: str = field(default="", init=False)
    _is_at_line_end: bool = field(default=True, init=False)

    def write(self, title: str, data: bytes) -> None:
        """Print ``data`` of the file with this title."""
        if self.has_titles and title != self._last:
            before = "" if self._is_at_line_end else "\n"
            write_stdout(
                f"{before}{chr(10) if self._last else ''}==> {title} <==\n".encode("utf-8", "backslashreplace")
            )
            self._last = title
        write_stdout(data)
        self._is_at_line_end = data.endswith(b"\n")


def logs(request: Request) -> None:
    """Print the log files to stdout, and report which are not on this machine.

    Raises:
        UsageError: there is no such run, attempt or rank.
        LaunchError: no attempt has started, or no file of these ranks is on this machine.
    """
    options, report = request.options, request.report
    asked = _Asked(request.value, options["ranks"], options["attempt"], options["follow"])
    run = find("--logs", request.value, request.log_dir)
    attempt, chosen = _chosen(run, asked)
    output = _Output()
    files = _opened(chosen, report, output)
    if not files:
        raise LaunchError(f"--logs: no log file of {ranks(chosen)} is on this machine", _hint(run), NODE_NOT_READY)
    _print_all(files, output)
    is_running = asked.follows
    while is_running:
        if is_running := run.is_running():
            _follow_for(_AGAIN_S, files, output)
        for now, started in _started(run, asked, attempt):
            if now != attempt:
                report(f"attempt {now}")
                _close(files)
                attempt, chosen, files = now, {}, []
            # The nodes of an attempt do not start at one moment.
            new = {rank: logs for rank, logs in started.items() if rank not in chosen}
            files += _opened(new, report, output)
            chosen |= started
            _print_all(files, output)
    if asked.follows and (problem := run.unknown()):
        report(f"{problem}; there: ssh {run.other_host} ddplaunch --logs {run.run_id} -f")


def _hint(run: RunFolder) -> str:
    return (
        f"What was shown of them: ddplaunch --attach {run.run_id}. --collect-logs copies the files at the end of a run."
    )


def _started(run: RunFolder, asked: _Asked, first: int) -> Iterator[tuple[int, dict[int, RankLogs]]]:
    """The attempts from ``first`` on, if they are to be shown, and of each the logs by rank: those of its ranks."""
    for attempt, found in sorted(_of_run(run).items()):
        if attempt == asked.attempt or (asked.attempt is None and attempt >= first):
            wanted = found if asked.ranks is None else found.keys() & asked.ranks
            yield attempt, {rank: found[rank] for rank in sorted(wanted)}


def _chosen(run: RunFolder, asked: _Asked) -> tuple[int, dict[int, RankLogs]]:
    """The attempt with which the command begins, and the logs of the ranks that are to be shown."""
    attempts = _of_run(run)
    if not attempts:
        raise LaunchError(f"--logs {asked.run_id}: no worker has started", f"See {run.name}.", NODE_NOT_READY)
    attempt = max(attempts) if asked.attempt is None else asked.attempt
    if attempt not in attempts:
        raise UsageError(f"--attempt {attempt}: the workers have started in attempt {fold_ints(attempts)} only")
    found = attempts[attempt]
    if missing := sorted(set(asked.ranks or ()) - found.keys()):
        raise UsageError(f"--ranks: no {ranks(missing)} in attempt {attempt}, which has {ranks(found)}")
    return attempt, {rank: found[rank] for rank in sorted(asked.ranks or found)}


def _opened(chosen: dict[int, RankLogs], report: Callable[[str], None], output: _Output) -> list[_File]:
    files = [file for logs in chosen.values() for file in _files(logs)]
    output.has_titles = output.has_titles or len(files) > 1
    for logs in chosen.values():
        if logs.folder is None:
            only = "; here are its last lines" if logs.last_lines else ""
            where = quote(f"{logs.host}:<run folder>/{logs.subfolder}", 300)
            report(f"rank {logs.rank}: its log files are on its node only, {where}{only}")
    return files


def _files(logs: RankLogs) -> list[_File]:
    """The files with lines of a rank, which may grow."""
    if logs.folder is None:
        paths = [logs.last_lines] if logs.last_lines else []
    else:
        paths = [path for name in _STREAMS if os.path.exists(path := logs.folder / f"{name}.log")]
    return [
        _File(f"rank {logs.rank} on {quote(logs.host)}, {path.stem}", LogFollower(path.parent, path.name))
        for path in paths
    ]


def _close(files: Iterable[_File]) -> None:
    for file in files:
        file.reader.close()


def _print_all(files: Iterable[_File], output: _Output) -> None:
    for file in files:
        while _print_next(file, output):
            pass


def _follow_for(seconds: float, files: Collection[_File], output: _Output) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any([_print_next(file, output) for file in files]):
            pause(_POLL_S)


def _print_next(file: _File, output: _Output) -> bool:
    data = file.reader.read()
    if data:
        output.write(file.title, data)
    return bool(data)


# Which ranks an attempt had, and where their files are. Lines that are cut or damaged are passed over.


def _of_run(run: RunFolder) -> dict[int, dict[int, RankLogs]]:
    """The logs by attempt and rank, as far as attempts have started."""
    found: dict[int, dict[int, RankLogs]] = {}
    for folder in run.of_all_launchers():
        starts = list(_starts(folder))
        # The files of several nodes are in a folder for each host.
        is_alone = len({event["host"] for event in starts}) == 1
        for event in starts:
            by_rank = found.setdefault(event["attempt"], {})
            for local_rank in range(event["workers"]):
                rank = event["first_rank"] + local_rank
                by_rank[rank] = _logs(folder, event, rank, local_rank, is_alone=is_alone)
    return found


def _starts(folder: Path) -> Iterator[Json]:
    """The events about workers that were started, in their order."""
    for event in run_json.lines(folder / run_json.EVENTS, b"attempt_started"):
        if event and event.get("event") == "attempt_started" and _is_whole(event):
            yield event


def _is_whole(event: Json) -> bool:
    numbers = all(type(event.get(key)) is int and 0 <= event[key] < limit for key, limit in _NUMBERS.items())
    host = event.get("host")
    return numbers and isinstance(host, str) and bool(host) and "/" not in host and host not in (".", "..")


def _logs(folder: Path, event: Json, rank: int, local_rank: int, *, is_alone: bool) -> RankLogs:
    subfolder, host = f"attempt_{event['attempt']}/{local_rank}", event["host"]
    places = (folder / host / subfolder, *((folder / subfolder,) if is_alone else ()))
    last_lines = folder / "failed" / f"rank_{rank}" / "last_lines.log"
    return RankLogs(
        rank,
        host,
        next(filter(os.path.isdir, places), None),
        subfolder,
        last_lines if os.path.isfile(last_lines) else None,
    )
