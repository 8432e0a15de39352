"""``--attach`` and ``--wait``: shows a run's console in another terminal, or waits for its end.

Runs in the process that the user started. It reads console.log, so that no launcher ever waits for it; it asks the
launcher, over the control socket, only to stop the run. Must import little: the first line appears at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import string
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.come_back.log_follower import POLL_S, LogFollower, pause, write_stdout
from ddplaunch.features.runs import run_json
from ddplaunch.features.runs.run_folders import RunFolder, find
from ddplaunch.protocol.environment import RUN_ID
from ddplaunch.system import procfs, run_tags
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.cli.commands import Request


CONSOLE_LOG = "console.log"

LEFT = 130
"""Exit code after Ctrl-C: the run goes on."""

_AGAIN_S = 0.7
"""After Ctrl-C, a second one so soon asks whether to stop the run."""

_END_S = 0.1
"""How often an idle viewer looks whether the run has ended."""

_BEGIN_S = 5.0
"""A launcher that has just started writes its first files within this time."""

_MAX_LAG_BYTES = 4 << 20
"""A terminal that is further behind than this skips lines: nobody can read them."""

_LINES = 24
_NICE = 10


def wait(request: Request) -> int:
    """Wait for the end of the run and return its exit code.

    Raises:
        UsageError: there is no such run.
        LaunchError: it keeps no files, or its launcher was killed.
    """
    run = _found("--wait", request)
    while run.is_running():
        time.sleep(_END_S)
    return run.exit_code()


def attach(request: Request) -> int:
    """Show the last lines of the run and what follows, until it ends or the user leaves; return the exit code.

    Raises:
        UsageError, LaunchError: as ``wait``.
    """
    run = _begun(_found("--attach", request))
    follower = LogFollower(run.path, CONSOLE_LOG)
    viewer = _Viewer(run, follower, request.report)
    try:
        while True:
            try:
                viewer.begin()
                return viewer.follow_to_the_end()
            except KeyboardInterrupt:
                if not _wants_to_stop(run, request.report):
                    return LEFT
                _stop(run, request.report)
    finally:
        follower.close()


def _found(option: str, request: Request) -> RunFolder:
    """The run, which must not be the one that this process is a part of: each would wait for the other's end."""
    run = find(option, request.value, request.log_dir)
    if run_tags.run_tag_of(os.environ.get(RUN_ID, "")) == run.started.run_tag != "":
        raise UsageError(f"{option} {request.value}: this command is a part of that run", "Use another terminal.")
    return run


def _begun(run: RunFolder) -> RunFolder:
    """``run`` with its run.json, once its launcher has written that and has begun console.log."""
    deadline = time.monotonic() + _BEGIN_S
    while run.is_running() and time.monotonic() < deadline:
        run = replace(run, started=run_json.facts(run.path))
        if run.started.run_id and os.path.exists(run.path / CONSOLE_LOG):
            break
        time.sleep(POLL_S)
    return run


class _Viewer:
    """Shows one run on stdout; messages go to ``report``."""

    def __init__(self, run: RunFolder, follower: LogFollower, report: Callable[[str], None]) -> None:
        self._run, self._follower, self._report = run, follower, report
        self._has_begun, self._is_terminal = False, os.isatty(1)
        self._was_running = run.is_running()
        self._coloured: Callable[[bytes], bytes] = lambda data: data
        if self._is_terminal and not os.environ.get("NO_COLOR"):
            self._coloured = colouring(run.started.line_prefix)

    def begin(self) -> None:
        """Show what this is, and the last lines, unless they have been shown."""
        if self._has_begun:
            return
        self._has_begun = True
        for line in _introduction(self._run, is_running=self._was_running):
            self._report(line)
        write_stdout(self._coloured(self._follower.last_lines(_rows())))
        os.nice(_NICE)  # Now that the first lines are shown, the job comes first.

    def follow_to_the_end(self) -> int:
        """Show what is written until the run ends; return its exit code."""
        looked_s = time.monotonic()
        while True:
            self._show_next()
            if time.monotonic() >= looked_s + _END_S:
                looked_s = time.monotonic()
                if not self._run.is_running():
                    break
            pause(POLL_S)  # Also in a flood of lines: it is the job that needs the CPU.
        while self._show_next():
            pass
        code = self._run.exit_code()
        if not self._was_running:
            self._report(f"the run has ended with exit code {code}")
        return code

    def _show_next(self) -> bool:
        if self._is_terminal and (skipped := self._follower.skip(_MAX_LAG_BYTES)):
            self._report(f"... {skipped >> 20} MB not shown: the run writes faster than this terminal shows")
        data = self._follower.read()
        if self._follower.has_gap:
            self._follower.has_gap = False
            self._report("... lines not shown: they were deleted before they could be shown here")
        write_stdout(self._coloured(data))
        return bool(data)


def _introduction(run: RunFolder, *, is_running: bool) -> list[str]:
    """What the user should know before the lines of the run."""
    more = f"; {run.launchers} launchers of it are on this machine, this is {run.name}" if run.launchers > 1 else ""
    if not is_running and (problem := run.unknown()):
        return [f"run {run.run_id}{more}; {problem}. There: ssh -t {run.other_host} ddplaunch --attach {run.run_id}"]
    if not is_running:
        return [f"run {run.run_id}{more}; it has ended"]
    lines = [f"run {run.run_id}{more}; Ctrl-C leaves it"]
    if run.other_host:
        kill = f"ssh {run.other_host} ddplaunch --kill {run.run_id}"
        lines.append(f"its launcher is on {run.other_host}, which shares the run folder; to end it: {kill}")
    if not os.path.exists(run.path / CONSOLE_LOG):
        raise LaunchError(f"{run.run_id}: it has no {CONSOLE_LOG}", f"Its files are in {run.name}.", NODE_NOT_READY)
    if _is_disk_full(run.path):
        lines.append(f"the disk of {run.name} is full: lines are missing here")
    if run.launcher_pid and (state := procfs.suspended(run.launcher_pid)):
        lines.append(f"its launcher is {state}, as by Ctrl-Z: `kill -CONT {run.launcher_pid}` continues it")
    return lines


def _is_disk_full(folder: Path) -> bool:
    try:
        kept_files.keep_free(folder, 0)
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False


def _rows() -> int:
    """About a screen of lines."""
    with contextlib.suppress(OSError):
        if rows := os.get_terminal_size(1).lines:
            return max(1, rows - 3)
    return _LINES


# Ctrl-C.


def _wants_to_stop(run: RunFolder, report: Callable[[str], None]) -> bool:
    """Whether a second Ctrl-C follows and the user then says yes; otherwise say how to come back."""
    try:
        there = f"ssh {run.other_host} " if run.other_host else ""
        back, end = f"ddplaunch --attach {run.run_id}", f"{there}ddplaunch --kill {run.run_id}"
        report(f"left; the run goes on. Back: {back}; end it: {end}")
        if not (os.isatty(0) and run.launcher_pid):
            return False
        time.sleep(_AGAIN_S)
    except KeyboardInterrupt:
        return _says_yes(f"ddplaunch: stop the run {quote(run.run_id)}? [y/N] ")
    return False


def _says_yes(question: str) -> bool:
    try:
        os.write(2, question.encode())
        return os.read(0, 100).strip().lower() in (b"y", b"yes")
    except (KeyboardInterrupt, OSError):
        return False


def _stop(run: RunFolder, report: Callable[[str], None]) -> None:
    from ddplaunch.features.come_back import launcher_request

    try:
        launcher_request.stop(run)
    except LaunchError as error:
        report(error.text)


# Colours of the prefixes in console.log, which has none: as on the console of the run.


_VALUES = {"rank": "[0-9]{1,9}", "local_rank": "[0-9]{1,9}", "time": "[0-9:.]+"}
_ANY = r"[^\s]*?"


def colouring(template: str) -> Callable[[bytes], bytes]:
    """A function that colours the prefixes of ``template`` in consecutive pieces of console.log.

    Without the rank in the template, the pieces stay as they are.
    """
    from ddplaunch.launcher.display.line_prefix import colour_of

    pattern = _pattern(template)
    is_at_start = True

    def coloured(match: re.Match[bytes]) -> bytes:
        return b"\x1b[%dm%b\x1b[0m" % (colour_of(int(match["rank"])), match[0])

    def colour(data: bytes) -> bytes:
        nonlocal is_at_start
        if not data or pattern is None:
            return data
        begin = 0 if is_at_start else data.find(b"\n") + 1 or len(data)
        is_at_start = data.endswith(b"\n")
        return data[:begin] + pattern.sub(coloured, data[begin:])

    return colour


def _pattern(template: str) -> re.Pattern[bytes] | None:
    """Matches the prefix at the beginning of a line."""
    parts, end, has_rank = ["^"], 0, False
    for match in string.Template.pattern.finditer(template):
        name = match["named"] or match["braced"]
        value = _VALUES.get(name, _ANY) if name else re.escape("$")
        if name == "rank" and not has_rank:
            has_rank, value = True, f"(?P<rank>{_VALUES['rank']})"
        parts += [re.escape(template[end : match.start()]), value]
        end = match.end()
    text = "".join((*parts, re.escape(template[end:])))
    return re.compile(text.encode("utf-8", "surrogateescape"), re.MULTILINE) if has_rank else None
