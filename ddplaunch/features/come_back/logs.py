"""``--logs``: prints the log files of ranks, and follows them, also those on other machines.

Runs in the process that the user started. It only reads files, so that no worker or agent of the run ever waits for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.come_back.log_follower import LogFollower, pause, write_stdout
from ddplaunch.features.come_back.remote_logs import RemoteLog, RemoteNodes
from ddplaunch.features.runs import run_json
from ddplaunch.features.runs.run_folders import RunFolder, find
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.files import kept_files
from ddplaunch.text import fold_ints, is_folder_name, quote, ranks
from ddplaunch.transport.failures import HostFailure

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request


_STREAMS = ("stdout", "stderr")
_POLL_S, _AGAIN_S = 0.1, 1.0
"""Seconds between two looks at the files, and at the run: whether it has ended, or another attempt has started. Files
on other machines are looked at as rarely as the run."""

_MAX_PROBLEM = 1000


@dataclass(frozen=True)
class RankLogs:
    """The log files of one rank in one attempt.

    Attributes:
        places: the folders on this machine that may have the files.
        folder_there: has the files on ``host``; empty if it is not known.
        tail: has the end of the output, if the rank has failed on another machine.
    """

    rank: int
    host: str
    places: tuple[str, ...]
    folder_there: str
    tail: str = ""

    # Looked for when it is shown: a run may have a million of them.

    @property
    def folder(self) -> str | None:
        """Has the files, if they are on this machine; None if they are only on ``host``."""
        return next(filter(os.path.isdir, self.places), None)

    @property
    def last_lines(self) -> str | None:
        """The file ``tail``; None if there is none."""
        return self.tail if os.path.isfile(self.tail) else None


class _Files:
    """The log files that are shown. Where there are several, a title stands before the lines of another one."""

    def __init__(self, nodes: RemoteNodes, streams: tuple[str, ...], report: Callable[[str], None]) -> None:
        """``streams`` are shown, of ``_STREAMS``. ``report`` gets why files cannot be shown."""
        self._nodes, self._streams, self._report = nodes, streams, report
        self._readers: dict[str, LogFollower | RemoteLog] = {}
        self._has_titles, self._last, self._is_at_line_end = False, "", True
        self._poll_s = _POLL_S
        self._shown: list[RankLogs] = []
        self._reported: set[tuple[str, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._readers)

    def add(self, new: Mapping[int, RankLogs]) -> None:
        """Show the files of these ranks from now on, which may grow."""
        there = [logs for logs in new.values() if logs.folder is None]
        self._shown += new.values()
        self._nodes.connect({logs.host: logs.folder_there for logs in there})
        for logs in new.values():
            title = f"rank {logs.rank} on {quote(logs.host)}, "
            if logs.folder is None and (logs.host, "") not in self._nodes.problems:
                self._poll_s = _AGAIN_S
                for name, path in zip(_STREAMS, _both_paths(logs), strict=True):
                    if name in self._streams:
                        self._readers[title + name] = RemoteLog(partial(self._nodes.read, logs.host, path))
                continue
            for file in _paths(logs, self._streams):
                if problem := _problem(file):
                    self._nodes.problems[logs.host, str(file)] = HostFailure(logs.host, "directory", problem)
                else:
                    self._readers[title + file.stem] = LogFollower(file.parent, file.name)
        self._has_titles = self._has_titles or len(self._readers) > 1
        self._report_problems()

    def close(self) -> None:
        """Show no more of any file."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._shown.clear()

    def print_all(self) -> None:
        """Print what each holds when it is its turn: a rank may write faster than this is read."""
        for title, reader in self._readers.items():
            if self._print_next(title, reader):
                _, end = reader.progress()
                while reader.progress()[0] < end and self._print_next(title, reader):
                    pass
        self._report_problems()

    def follow_for(self, seconds: float) -> None:
        """Print what is written meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not any([self._print_next(title, reader) for title, reader in self._readers.items()]):
                pause(self._poll_s)
        self._report_problems()

    def _print_next(self, title: str, reader: LogFollower | RemoteLog) -> bool:
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

    def _report_problems(self) -> None:
        """One line for each host or file that cannot be read, once."""
        for host, path in [key for key in self._nodes.problems if key not in self._reported]:
            self._reported.add((host, path))
            of_host = (each for each in self._shown if each.host == host)
            found = [each for each in of_host if (path in _both_paths(each) if path else each.folder is None)]
            last = [each.rank for each in found if each.last_lines and not path]
            more = f"; here are the last lines of {ranks(last)}" if last else ""
            problem = quote(self._nodes.problems[host, path].message, _MAX_PROBLEM)
            self._report(f"{quote(host)}, {ranks(each.rank for each in found)}: {problem}{more}")


def logs(request: Request) -> None:
    """Print the log files to stdout. Those that are only on other machines are read there.

    Raises:
        UsageError: there is no such run, attempt or rank.
        LaunchError: no attempt has started, or some of the files could not be read; the others have been printed.
    """
    wanted, only = request.options["ranks"], request.options["attempt"]
    run = find("--logs", request.value, request.log_dir)
    attempt, chosen = _chosen(run, request.value, wanted, only)
    streams = tuple(name for name in _STREAMS if request.options[name]) or _STREAMS
    with contextlib.closing(RemoteNodes(request)) as nodes:
        files = _Files(nodes, streams, request.report)
        files.add(chosen)
        files.print_all()
        if request.options["follow"]:
            _follow(files, run, request, attempt, chosen)
        if nodes.problems:
            hint = next((problem.hint for problem in nodes.problems.values() if problem.hint), "")
            raise LaunchError(f"--logs {request.value}: not all log files could be read", hint, NODE_NOT_READY)
        if not files:
            raise LaunchError(f"--logs: there is no log file of {ranks(chosen)}", _hint(run), NODE_NOT_READY)


def _follow(files: _Files, run: RunFolder, request: Request, attempt: int, chosen: dict[int, RankLogs]) -> None:
    """Print what follows, until the run ends."""
    wanted, only = request.options["ranks"], request.options["attempt"]
    is_running = True
    while is_running:
        if is_running := run.is_running():
            files.follow_for(_AGAIN_S)
        for now, started in _started(run, wanted, only, attempt):
            if now != attempt:
                files.print_all()
                request.report(f"attempt {now}")
                files.close()
                attempt, chosen = now, {}
            # The nodes of an attempt do not start at one moment.
            files.add({rank: logs for rank, logs in started.items() if rank not in chosen})
            chosen |= started
    files.print_all()
    if problem := run.unknown():
        request.report(f"{problem}; there: ssh {run.other_host} ddplaunch --logs {run.run_id} -f")


def _hint(run: RunFolder) -> str:
    return f"What the console showed of them: ddplaunch --attach {run.run_id}."


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


def _paths(logs: RankLogs, streams: Collection[str]) -> list[Path]:
    """The files on this machine with lines of a rank."""
    if logs.folder is None:
        return [Path(logs.last_lines)] if logs.last_lines else []
    return [path for name in streams if os.path.lexists(path := Path(logs.folder, f"{name}.log"))]


def _problem(file: Path) -> str:
    """Why a file on this machine cannot be read; empty if it can."""
    try:
        kept_files.close(kept_files.regular_fd(file))
    except OSError as error:
        # The run folder is known by a descriptor.
        return f"{os.path.realpath(file.parent)}/{file.name}: {error.strerror}"
    return ""


def _both_paths(logs: RankLogs) -> list[str]:
    """The files with lines of a rank, of both streams, on this machine or another."""
    return [f"{logs.folder or logs.folder_there}/{name}.log" for name in _STREAMS]


# Which ranks an attempt had, and where their files are. Lines that are cut or damaged are passed over.


def _of_run(run: RunFolder) -> dict[int, dict[int, RankLogs]]:
    """The logs by attempt and rank, as far as attempts have started."""
    found: dict[int, dict[int, RankLogs]] = {}
    for folder in run.of_all_launchers():
        events = run_json.lines(folder / run_json.EVENTS, b"attempt_started")
        starts = [
            (event, event["host"], attempt, started)
            for event, attempt, started in run_json.starts(events)
            if is_folder_name(run_json.text(event, "host"))
        ]
        # The files of several nodes are in a folder for each host.
        is_alone = len({host for _, host, _, _ in starts}) == 1
        for event, host, attempt, started in starts:
            there = run_json.text(event, "folder")
            for local_rank, rank in enumerate(started):
                subfolder = f"attempt_{attempt}/{local_rank}"
                logs = _logs(folder, host, rank, subfolder, there, is_alone=is_alone)
                found.setdefault(attempt, {})[rank] = logs
    return found


def _logs(folder: Path, host: str, rank: int, subfolder: str, there: str, *, is_alone: bool) -> RankLogs:
    places = (f"{folder}/{host}/{subfolder}", *((f"{folder}/{subfolder}",) if is_alone else ()))
    tail = f"{folder}/failed/rank_{rank}/last_lines.log"
    return RankLogs(rank, host, places, f"{there}/{subfolder}" if there else "", tail)
