"""The end of what the console showed, and the files that the page leads to.

The links are relative: a run folder may be moved, and ``--serve`` offers the same files below the address of the page.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote

from ddplaunch.features.page.reading import RunFiles, block, last_part
from ddplaunch.features.runs import run_json
from ddplaunch.launcher.display import console_log
from ddplaunch.system.files import run_folder

if TYPE_CHECKING:
    from pathlib import Path


_FILES = (console_log.FILE, run_folder.FAILURE_PAGE, "hang.txt", "stacks.txt", run_folder.REPORT, run_json.EVENTS)
_STREAMS = ("stdout.log", "stderr.log")
_TAIL_BYTES, _TAIL_LINES, _MAX_TEXT = 64 << 10, 60, 20_000
_MAX_RANKS = 32
_FAILURE_PAGE = "= ddplaunch: the job failed ="


Links = list[tuple[str, str]]
"""Name and address of files."""


def last_lines(files: RunFiles, share: float) -> str:
    """The last lines of console.log, of the first launcher that has one; without the failure page.

    ``share``: of the usual length. Of a line that was redrawn, the last state.
    """
    for folder in files.launchers:
        text = last_part(folder / console_log.FILE, _TAIL_BYTES).decode("utf-8", "replace")
        lines = [each.rstrip("\r").rpartition("\r")[2] for each in text.split("\n")]
        end = next((index for index, each in enumerate(lines) if _FAILURE_PAGE in each), len(lines))
        if shown := "\n".join(lines[:end]).strip("\n"):
            return block("\n".join(shown.split("\n")[-_TAIL_LINES:]), int(_MAX_TEXT * share))
    return ""


def run_links(files: RunFiles) -> Links:
    """Name and address of the files about the whole run that there are."""
    found = ((folder, folder / name) for folder in files.launchers[:_MAX_RANKS] for name in _FILES)
    return [
        (path.name if folder == files.folder else f"{folder.name}/{path.name}", _address(files.folder, path))
        for folder, path in found
        if is_file_in(files.folder, path)
    ]


def rank_links(files: RunFiles) -> tuple[list[tuple[int, Links]], int]:
    """The first ranks of the last attempt, with their log files that are here; and how many ranks are left out."""
    starts = list(run_json.starts(files.events))
    last = max((attempt for _, attempt, _ in starts), default=0)
    of_last = sorted(
        (rank, run_json.text(event, "host"), local_rank)
        for event, attempt, started in starts
        if attempt == last
        for local_rank, rank in enumerate(started)
    )
    first = ((rank, of_worker(files, host, last, local_rank)) for rank, host, local_rank in of_last[:_MAX_RANKS])
    return [each for each in first if each[1]], max(0, len(of_last) - _MAX_RANKS)


def of_worker(files: RunFiles, host: str, attempt: int, local_rank: int) -> Links:
    """The log files of a worker, as far as they are here."""
    folders = (folder / part for folder in _of_host(files, host) for part in _parts(host, attempt, local_rank))
    folder = next(filter(os.path.isdir, folders), None)
    paths = [folder / name for name in _STREAMS if is_file_in(files.folder, folder / name)] if folder else []
    return [(path.stem, _address(files.folder, path)) for path in paths]


def _of_host(files: RunFiles, host: str) -> list[Path]:
    """The folders of launchers that may have the files of a host: of many launchers those that are named after it."""
    if len(files.launchers) == 1:
        return files.launchers
    return [folder for folder in files.launchers if folder.name == host or folder.name.startswith(f"{host}.")]


def _parts(host: str, attempt: int, local_rank: int) -> Iterator[str]:
    """Where a worker's files may be in the folder of a launcher; ``host`` may be no name of a folder."""
    own = f"attempt_{attempt}/{local_rank}"
    if host not in ("", ".", "..") and not {"/", "\0"} & {*host}:
        yield f"{host}/{own}"
    yield own


def is_file_in(folder: Path, path: Path) -> bool:
    """Whether this is a file in the run folder: a job may have put a link to another one in its place."""
    return os.path.isfile(path) and os.path.realpath(path).startswith(f"{os.path.realpath(folder)}/")


def _address(folder: Path, path: Path) -> str:
    with contextlib.suppress(ValueError):
        return quote(os.fsencode(path.relative_to(folder)))
    return ""
