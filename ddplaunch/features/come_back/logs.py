"""``--logs``: prints the log files of ranks, and follows them.

Runs in the process that the user started. It only reads files, so that no worker or agent ever waits for it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.come_back.log_follower import LogFollower, pause, write_stdout
from ddplaunch.features.runs import run_json
from ddplaunch.features.runs.run_folders import find
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import fold_ints, is_folder_name, quote, ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from ddplaunch.cli.commands import Request
    from ddplaunch.features.runs.run_folders import RunFolder


_STREAMS = ("stdout", "stderr")
_POLL_S, _AGAIN_S = 0.1, 1.0
"""Seconds between two looks at the files, and at the run: whether it has ended, or another attempt has started."""


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


class _Files:
    """The log files that are shown. Where there are several, a title stands before the lines of another one."""

    def __init__(self) -> None:
        self._readers: dict[str, LogFollower] = {}
        self._has_titles, self._last, self._is_at_line_end = False, "", True

    def __bool__(self) -> bool:
        return bool(self._readers)

    def add(self, ranks: Iterable[RankLogs]) -> None:
        """Show the files of these ranks from now on, which may grow."""
        for logs in ranks:
            for path in _paths(logs):
                title = f"rank {logs.rank} on {quote(logs.host)}, {path.stem}"
                self._readers[title] = LogFollower(path.parent, path.name)
        self._has_titles = self._has_titles or len(self._readers) > 1

    def close(self) -> None:
        """Show no more of any file."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def print_all(self) -> None:
        """Print what they hold now."""
        for title, reader in self._readers.items():
            while self._print_next(title, reader):
                pass

    def follow_for(self, seconds: float) -> None:
        """Print what is written meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not any([self._print_next(title, reader) for title, reader in self._readers.items()]):
                pause(_POLL_S)

    def _print_next(self, title: str, reader: LogFollower) -> bool:
        data = reader.read()
        if not data:
            return False
        if self._has_titles and title != self._last:
            before = "" if self._is_at_line_end else "\n"
            between = "\n" if self._last else ""
            write_stdout(f"{before}{between}==> {title} <==\n".encode("utf-8", "backslashreplace"))
            self._last = title
        write_stdout(data)
        self._is_at_line_end = data.endswith(b"\n")
        return True


def logs(request: Request) -> None:
    """Print the log files to stdout, and report which are not on this machine.

    Raises:
        UsageError: there is no such run, attempt or rank.
        LaunchError: no attempt has started, or no file of these ranks is on this machine.
    """
    wanted, only = request.options["ranks"], request.options["attempt"]
    follows, report = request.options["follow"], request.report
    run = find("--logs", request.value, request.log_dir)
    attempt, chosen = _chosen(run, request.value, wanted, only)
    files = _Files()
    files.add(chosen.values())
    _report_missing(chosen.values(), report)
    if not files:
        raise LaunchError(f"--logs: no log file of {ranks(chosen)} is on this machine", _hint(run), NODE_NOT_READY)
    files.print_all()
    is_running = follows
    while is_running:
        if is_running := run.is_running():
            files.follow_for(_AGAIN_S)
        for now, started in _started(run, wanted, only, attempt):
            if now != attempt:
                report(f"attempt {now}")
                files.close()
                attempt, chosen = now, {}
            # The nodes of an attempt do not start at one moment.
            new = [logs for rank, logs in started.items() if rank not in chosen]
            files.add(new)
            _report_missing(new, report)
            chosen |= started
            files.print_all()
    if follows and (problem := run.unknown()):
        report(f"{problem}; there: ssh {run.other_host} ddplaunch --logs {run.run_id} -f")


def _hint(run: RunFolder) -> str:
    return (
        f"What was shown of them: ddplaunch --attach {run.run_id}. --collect-logs copies the files at the end of a run."
    )


def _started(
    run: RunFolder, wanted: Collection[int] | None, only: int | None, first: int
) -> Iterator[tuple[int, dict[int, RankLogs]]]:
    """The attempts from ``first`` on, or the ``only`` one, and of each the logs of the ``wanted`` ranks, or of all."""
    for attempt, found in sorted(_of_run(run).items()):
        if attempt == only or (only is None and attempt >= first):
            shown = found if wanted is None else found.keys() & wanted
            yield attempt, {rank: found[rank] for rank in sorted(shown)}


def _chosen(
    run: RunFolder, run_id: str, wanted: Collection[int] | None, only: int | None
) -> tuple[int, dict[int, RankLogs]]:
    """The attempt with which the command begins, and the logs of the ranks that are to be shown."""
    attempts = _of_run(run)
    if not attempts:
        raise LaunchError(f"--logs {run_id}: no worker has started", f"See {run.name}.", NODE_NOT_READY)
    attempt = max(attempts) if only is None else only
    if attempt not in attempts:
        raise UsageError(f"--attempt {attempt}: the workers have started in attempt {fold_ints(attempts)} only")
    found = attempts[attempt]
    if missing := sorted(set(wanted or ()) - found.keys()):
        raise UsageError(f"--ranks: no {ranks(missing)} in attempt {attempt}, which has {ranks(found)}")
    return attempt, {rank: found[rank] for rank in sorted(wanted or found)}


def _report_missing(chosen: Iterable[RankLogs], report: Callable[[str], None]) -> None:
    for logs in chosen:
        if logs.folder is None:
            only = "; here are its last lines" if logs.last_lines else ""
            where = quote(f"{logs.host}:<run folder>/{logs.subfolder}", 300)
            report(f"rank {logs.rank}: its log files are on its node only, {where}{only}")


def _paths(logs: RankLogs) -> list[Path]:
    """The files with lines of a rank."""
    if logs.folder is None:
        return [logs.last_lines] if logs.last_lines else []
    return [path for name in _STREAMS if os.path.exists(path := logs.folder / f"{name}.log")]


# Which ranks an attempt had, and where their files are. Lines that are cut or damaged are passed over.


def _of_run(run: RunFolder) -> dict[int, dict[int, RankLogs]]:
    """The logs by attempt and rank, as far as attempts have started."""
    found: dict[int, dict[int, RankLogs]] = {}
    for folder in run.of_all_launchers():
        events = run_json.lines(folder / run_json.EVENTS, b"attempt_started")
        starts = [
            (event["host"], attempt, started)
            for event, attempt, started in run_json.starts(events)
            if is_folder_name(run_json.text(event, "host"))
        ]
        # The files of several nodes are in a folder for each host.
        is_alone = len({host for host, _, _ in starts}) == 1
        for host, attempt, started in starts:
            for local_rank, rank in enumerate(started):
                subfolder = f"attempt_{attempt}/{local_rank}"
                logs = _logs(folder, host, rank, subfolder, is_alone=is_alone)
                found.setdefault(attempt, {})[rank] = logs
    return found


def _logs(folder: Path, host: str, rank: int, subfolder: str, *, is_alone: bool) -> RankLogs:
    places = (folder / host / subfolder, *((folder / subfolder,) if is_alone else ()))
    last_lines = folder / "failed" / f"rank_{rank}" / "last_lines.log"
    return RankLogs(
        rank,
        host,
        next(filter(os.path.isdir, places), None),
        subfolder,
        last_lines if os.path.isfile(last_lines) else None,
    )
