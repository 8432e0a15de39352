"""Finds the folder of a run on this machine, by the run's id, the beginning of its id, or ``last``.

Runs in the process that the user started, and only reads. Looks into the default folder and ``--log-dir``; a live run
is also found elsewhere, by its launcher. Must import little: ``--attach`` shows its first line at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddplaunch.config import NO_LOGS
from ddplaunch.errors import NO_REPORT, NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.runs import own_pids, run_json
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system import procfs, run_tags
from ddplaunch.system.files import run_folder
from ddplaunch.system.files.run_folder import LOCK, RunFacts
from ddplaunch.text import quote

JOBS = "jobs"
"""Folder, in that of a sweep of parameters, with the run folders of its jobs."""

LAST = "last"
"""In place of a run id: the run that was started last."""

_AGAIN = re.compile(r"\.(?:[2-9]|[0-9a-f]{6})")
"""The end of a folder's name after the run id, if an earlier run had this id."""

_MAX_NAMED, _MAX_KNOWN = 5, 100


@dataclass(frozen=True)
class RunFolder:
    """The folder of a launcher of the run.

    Attributes:
        path: leads to the folder also after it was moved, as long as this process lives.
        name: path of the folder when it was found, for messages.
        started: run.json.
        launchers: the run's launchers with a folder on this machine.
    """

    run_id: str
    path: Path
    name: Path
    started: RunFacts
    launchers: int = 1

    @property
    def launcher_pid(self) -> int:
        """Of the launcher, if it is on this machine; otherwise 0."""
        return self.started.pid if self.started.host == socket.gethostname() else 0

    @property
    def other_host(self) -> str:
        """The host of the launcher, if that is not this machine but one that shares the folder; otherwise empty."""
        host = quote(self.started.host)
        return "" if host == socket.gethostname() else host

    def is_running(self) -> bool:
        """Whether the launcher is alive, as far as this machine shows it."""
        return is_running(self.path, self.started)

    def unknown(self) -> str:
        """Why nobody knows here whether a run that does not seem to go on has ended; empty if that is known."""
        if not self.other_host or os.path.lexists(self.path / run_folder.REPORT):
            return ""
        return f"there is no report, and its launcher is not on this machine but on {self.other_host}"

    def of_all_launchers(self) -> tuple[Path, ...]:
        """The folders of the run's launchers on this machine, or on a file system that they share."""
        whole = self.name.parent
        return run_json.of_launchers(whole) if run_json.has_launchers(whole) else (self.path,)

    def exit_code(self) -> int:
        """The exit code of the run, which has ended.

        Raises:
            LaunchError: the launcher has left no report.
        """
        code = run_json.integer(run_json.read(self.path / run_folder.REPORT) or {}, "exit_code")
        if code is not None and 0 <= code <= 255:
            return code
        if problem := self.unknown():
            hint = f"There: ssh {self.other_host} ddplaunch --wait {self.run_id}."
        elif os.path.lexists(self.path / run_folder.REPORT):
            problem, hint = "its report cannot be read", f"See {self.name}/{run_folder.REPORT}."
        else:
            problem = "its launcher was killed before it wrote a report"
            hint = f"Its last lines: {self.name}/console.log."
        raise LaunchError(f"{self.run_id}: the exit code is not known: {problem}", hint, NO_REPORT)


def is_running(folder: Path, started: RunFacts) -> bool:
    """Whether the launcher of the run folder is alive; ``started`` is its run.json."""
    return run_json.is_locked(folder) or _has_launcher(started)


def bases(log_dir: str | None) -> list[Path]:
    """The folders with the run folders of this machine: the default one, and ``log_dir``."""
    return list(dict.fromkeys(filter(None, (run_folder.base_at_home(os.environ), _given(log_dir)))))


def _given(log_dir: str | None) -> Path | None:
    return Path(log_dir).absolute() if log_dir and log_dir != NO_LOGS else None


def find(option: str, text: str, log_dir: str | None) -> RunFolder:
    """The run that ``text``, the value of ``option``, means.

    Of several with one id one in ``log_dir``, if that is given; then a live one, in any folder; then the newest.

    Raises:
        UsageError: there is no such run, or several ids begin so.
        LaunchError: the run keeps no files.
    """
    where = bases(log_dir)
    word, _, part = text.partition("/")
    if not word:
        raise UsageError(f"{option} {text}: no run id", f"{option} {LAST} is the run that was started last.")
    given = _given(log_dir)
    in_given = _named(word, _in_bases([given])) if given else []
    found = in_given or _named(word, _in_bases(where))
    if not in_given and not any(is_running(folder, _started(folder)) for folder in found):
        live = {tag: (run_id, folder) for tag, run_id, folder in _live(only_ours=word == LAST)}
        folders = dict.fromkeys(
            (*_in_bases(where), *(run_of(folder) for _, folder in live.values() if folder is not None))
        )
        found = _last(folders) if word == LAST else _named(word, folders) or _beginning(option, word, folders)
        if not found and any(word in (tag, run_id) for tag, (run_id, _) in live.items()):
            raise LaunchError(f"{option} {text}: this run keeps no files (--log-dir /dev/null)", "", NODE_NOT_READY)
    if not found and not part and (sweep := _sweep_of(word, where)):
        found, part = [sweep], word.rpartition("-")[2]
    if not found:
        raise _unknown(option, text, where)
    return _of_launcher(found[0], part, option, text) if part else _of_run(found)


def host_of_launcher(run_id: str) -> str:
    """The other host of the launcher of a run that has not ended, as the default folder shows it; empty: it does not.

    ``run_id`` may also be its run tag.
    """
    with contextlib.suppress(LaunchError):
        run = find("", run_id, None)
        if run_id in (run.run_id, run.started.run_tag) and (run.is_running() or run.unknown()):
            return run.other_host
    return ""


def has_ended(run_id: str) -> bool:
    """Whether the default folder shows that this run has ended. ``run_id`` may also be its run tag."""
    with contextlib.suppress(LaunchError):
        run = find("", run_id, None)
        return run_id in (run.run_id, run.started.run_tag) and not (run.is_running() or run.unknown())
    return False


def id_for(option: str, word: str, log_dir: str | None) -> str:
    """``word``, a run id; for ``last`` that of the run that was started last.

    Only of the runs with a folder in the default folder or in ``log_dir``: a run that is ended by mistake is lost.

    Raises:
        UsageError: there is no run.
    """
    if word != LAST:
        return word
    where = bases(log_dir)
    found = _last(_in_bases(where))
    if not found:
        raise _unknown(option, word, where)
    return _id_of(found[0])


def known_ids() -> list[str]:
    """The ids of all runs with a folder in the default folder, for completion."""
    return sorted({_id_of(folder) for folder in _newest_first(_in_bases(bases(None)))[:_MAX_KNOWN]})


# Names of folders.


def _in_bases(where: Iterable[Path]) -> Iterator[Path]:
    for base in where:
        with contextlib.suppress(OSError):
            yield from (base / name for name in os.listdir(base) if not name.startswith("."))


def run_of(folder: Path) -> Path:
    """The folder of the whole run, which has those of its launchers if every node has one."""
    return folder.parent if run_json.has_launchers(folder.parent) else folder


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    return sorted(filter(run_json.of_launchers, folders), key=made_s, reverse=True)


def _last(folders: Iterable[Path]) -> list[Path]:
    return _newest_first(folders)[:1]


def _named(word: str, folders: Iterable[Path]) -> list[Path]:
    """The folders of all runs with this run id or run tag, the newest first."""
    run_id = run_tags.run_id_of(word)
    found = [folder for folder in folders if folder.name in (word, run_id) or _is_again(folder.name, run_id)]
    return _newest_first(folder for folder in found if word in (_id_of(folder), _started(folder).run_tag))


def _beginning(option: str, word: str, folders: Iterable[Path]) -> list[Path]:
    """The folders of the only run whose id begins with ``word``, or has it behind its last dash; the newest first.

    Raises:
        UsageError: there are several such runs.
    """
    found = _newest_first(
        folder for folder in folders if folder.name.startswith(word) or folder.name.rpartition("-")[2] == word
    )
    ids = list(dict.fromkeys(map(_id_of, found)))
    if len(ids) > 1:
        more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
        text = f"{option} {word}: several runs begin so: {', '.join(ids[:_MAX_NAMED])}{more}"
        raise UsageError(text, "Give more of the run id.")
    return found


def _is_again(name: str, run_id: str) -> bool:
    return name.startswith(run_id) and bool(_AGAIN.fullmatch(name, len(run_id)))


def _started(folder: Path) -> RunFacts:
    launchers = run_json.of_launchers(folder)
    return run_json.facts(launchers[0]) if launchers else RunFacts()


def _id_of(folder: Path) -> str:
    return _started(folder).run_id or folder.name


def made_s(folder: Path) -> float:
    """When a run folder was made, in seconds since 1970; 0 if it cannot be read."""
    for path in (folder / LOCK, folder / run_folder.NODES, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _unknown(option: str, text: str, where: Iterable[Path]) -> UsageError:
    newest = _newest_first(_in_bases(where))[:_MAX_NAMED]
    hint = f"The newest are: {', '.join(map(_id_of, newest))}." if newest else ""
    looked = " and ".join(map(str, where)) or "a home folder: there is none"
    return UsageError(f"{option} {text}: no run of yours with this id in {looked}", f"{hint} See --log-dir.".strip())


# The folder of one launcher.


def _sweep_of(job: str, where: Iterable[Path]) -> Path | None:
    """The folder of the sweep of which this run id is a job."""
    name = job.rpartition("-")[0]
    found = (folder for folder in _in_bases(where) if folder.name == name and os.path.isdir(folder / JOBS / job))
    return next(found, None)


def _of_launcher(run: Path, name: str, option: str, text: str) -> RunFolder:
    """The folder with this name of a launcher of the run: other words must not lead out of the run's folder."""
    folders = {folder.name: folder for folder in run_json.of_launchers(run)}
    folders = {job.name.rpartition("-")[2]: job for job in sorted((run / JOBS).glob("*"))} or folders
    if name not in folders:
        hint = f"It has {', '.join(sorted(folders)[:_MAX_NAMED])}."
        raise UsageError(f"{option} {text}: no launcher or job of this run has this folder", hint)
    return _opened(folders[name])


def _of_run(runs: list[Path]) -> RunFolder:
    """Of the first of ``runs`` that goes on, else of the first; of its launchers one on this machine, if any is."""
    opened = [[_opened(folder) for folder in run_json.of_launchers(run)] for run in runs]
    live = [launchers for launchers in opened if any(map(RunFolder.is_running, launchers))]
    launchers = (live or opened)[0]
    here = [each for each in launchers if each.launcher_pid] or launchers
    best = next(filter(RunFolder.is_running, here), here[0])
    return RunFolder(best.run_id, best.path, best.name, best.started, len(here))


def _opened(folder: Path) -> RunFolder:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        is_own = run_folder.is_own(folder, fd)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None
    if not is_own:
        raise UsageError(f"{folder}: another user has made this folder")
    path = Path(f"/proc/self/fd/{fd}")
    started = run_json.facts(path)
    return RunFolder(started.run_id or folder.name, path, folder, started)


# Live runs.


def _live(*, only_ours: bool = False) -> Iterator[tuple[str, str, Path | None]]:
    """Run tag, run id and folder of every live launcher of this user; the folder is None if it keeps no files.

    ``only_ours``: of those with this state folder. A script or a test with its own XDG_STATE_HOME has runs of its own.
    """
    for pid in own_pids():
        tags = run_tags.launcher_memfds(pid)
        if tags and not (only_ours and not has_our_state_folder(procfs.read(f"/proc/{pid}/environ"))):
            folders = {started.run_tag: folder for folder, started in run_json.of_launcher(pid)}
            for tag, run_id in tags.items():
                yield tag, run_id, folders.get(tag)


def has_our_state_folder(environ: bytes) -> bool:
    """Whether a process with these contents of /proc/PID/environ has this process's default folder of run folders."""
    names = ("XDG_STATE_HOME", "HOME")
    variables = {name: value for name in names for value in procfs.values(environ, name)}
    return run_folder.base_at_home(variables) == run_folder.base_at_home(os.environ)


def _has_launcher(started: RunFacts) -> bool:
    is_here = started.host == socket.gethostname() and started.pid > 0
    return is_here and started.run_tag in run_tags.launcher_memfds(started.pid)
