"""The messages of a run: at the start, after attempts, and at the end with the failure page and the report files.

Runs in the launcher, in the main thread. Formats and shows; decides nothing about the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.errors import LaunchError, Level
from ddplaunch.launcher.display import failure_page, report_files
from ddplaunch.launcher.display.console import Console, Progress
from ddplaunch.protocol import first_failure
from ddplaunch.system.files import kept_files
from ddplaunch.system.files.run_folder import REPORT
from ddplaunch.text import duration, escape, plural, quote, ranks
from ddplaunch.threads import result_of

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.display.line_prefix import Style
    from ddplaunch.protocol.launcher_agent import AttemptStarted
    from ddplaunch.protocol.results import AttemptResult
    from ddplaunch.protocol.run_result import RunResult

_SUSPEND_S = 0.5
"""Seconds to wait for the output that is still shown before this process is suspended."""

_SHORT_S = 10.0
"""The time of a shorter run is shown with tenths of a second."""

_STALL_S, _STOPPED_STALL_S = 10.0, 2.0
"""Seconds to wait at the end for a stopped terminal; the second value applies after a signal of the user."""

_FILES_S = 60.0
"""Seconds for the report and all other files of a result; ``_STOPPED_STALL_S`` after the user has asked for the end,
none after asking twice."""

_GIVEN_UP = "it took too long"


class UserMessages:
    """The messages of one run, as far as ``--verbose`` and ``--quiet`` allow them.

    Attributes:
        run_id: the run's, as events show it.
        progress: shows the progress of long activities.
        console: where all is shown.
    """

    def __init__(
        self, config: LaunchConfig, run_id: str, folder: Path | None, console: Console, note: Callable[..., None]
    ) -> None:
        """``folder`` is the run's; None if no files are kept. ``note`` gets every message, as ``Watches.note``."""
        self._config = config
        self.run_id = run_id
        self._folder = folder
        self.console = console
        console.logs = where_logs(config, folder)
        self._note = note
        self._count = 0
        self._workers_ran = False
        self._position: tuple[int, int, int] | None = None
        self.progress = Progress(console, is_quiet=config.output.verbosity < 0)

    @property
    def _is_remote(self) -> bool:
        return not self._config.is_local

    def folder_moved(self, folder: Path | None, style: Style) -> None:
        """The run folder is now ``folder``; ``style`` names it in the messages of the console."""
        self._folder = folder
        self.console.logs = where_logs(self._config, folder)
        self.console.restyle(style)

    def show(self, text: str, level: int, kind: str = "message", **facts: object) -> None:
        """Show a message of this ``Level``, and note it as an event of this ``kind`` with these ``facts``.

        Main thread. The message gets the prefix ``ddplaunch:``, and control characters in it are escaped. ``node`` and
        ``t`` among the facts are the arguments of ``Watches.note``.
        """
        self._note(kind, text, **facts, **({"level": level} if kind == "message" else {}))
        if level <= self._config.output.verbosity:
            self.console.show(f"ddplaunch: {text}")

    def run_started(self) -> None:
        """Show notices, the hosts and the forwarded variables."""
        for notice in self._config.notices:
            self.show(str(notice), notice.min_verbosity)
        if self._config.dry_run:
            self.show(dry_run_banner(self._config), Level.NORMAL)
        if self._is_remote:
            self._show_hosts()

    def _show_hosts(self) -> None:
        from ddplaunch.cluster.hosts import display_names, fold

        names = display_names(self._config.hosts)[: self._config.max_nodes]
        self.show(f"starting on {quote(fold(names))}", Level.NORMAL)
        for lines in features.call_each("shown_variables", dict(self._config.remote.environ)):
            for line in lines:
                self.show(f"forwarded: {line}", Level.VERBOSE)

    def nodes_ready(self, local_world_sizes: Mapping[str, int]) -> None:
        """All agents are ready. ``local_world_sizes`` are the numbers of workers by host."""
        count, nodes = sum(local_world_sizes.values()), len(local_world_sizes)
        self._count = count
        template = self._config.output.line_prefix
        if template == "" or (template is None and count == 1 and self._config.max_nodes == 1):
            self.console.show_no_prefix()
        on = next(iter(local_world_sizes)) if nodes == 1 else plural(nodes, "node")
        self.show(f"{plural(count, 'worker')} on {on}, {where_logs(self._config, self._folder)}", Level.NORMAL)

    def attempt_started(self, started: AttemptStarted, *, is_first: bool) -> None:
        """The workers of a node run; ``is_first``: it is the first node of the attempt of which this is known."""
        self._workers_ran = True
        self._show_position(started)
        if is_first:
            are = "is" if started.world_size == 1 else "are"
            self.show(f"attempt {started.attempt}: {ranks(range(started.world_size))} {are} running", Level.VERBOSE)

    def _show_position(self, started: AttemptStarted) -> None:
        """Where each node has a launcher: show this node's place among those that have met, if it is new."""
        position = (started.node_rank, started.nnodes, started.world_size)
        if not self._config.each_node_has_launcher or self._config.task is not None or position == self._position:
            return
        self._position = position
        here = ranks(range(started.first_rank, started.first_rank + len(started.pids)))
        place = f"node {started.node_rank} of {started.nnodes}"
        self.show(f"{place}, {plural(started.world_size, 'worker')} in all, {here} here", Level.NORMAL)

    def suspended(self, terminals: Collection[str] = ()) -> None:
        """This process is about to be suspended (Ctrl-Z). A lone worker goes on writing to these ``terminals``."""
        if not self._count:
            effect = "while the nodes start; fg resumes the launcher"
        elif self.worker_has_terminal(terminals):
            effect = "the worker runs on and writes to this terminal; fg resumes the launcher"
        else:
            effect = f"the workers run on{' for up to a day' if self._is_remote else ''}; fg shows their output"
            if self._folder:
                effect += f", `ddplaunch --leave {self.run_id}` lets you close this terminal"
        self.show(f"suspended: {effect}", Level.NORMAL)
        self.console.wait_shown(_SUSPEND_S)

    @property
    def has_workers(self) -> bool:
        """Whether all agents have been ready."""
        return bool(self._count)

    def worker_has_terminal(self, terminals: Collection[str]) -> bool:
        """Whether a lone worker writes to this process's terminal itself; ``terminals`` as for ``suspended``."""
        return self._count == self._config.max_nodes == 1 and bool({"stdout", "stderr"} & {*terminals})

    def attempt_ended(self, result: AttemptResult, *, is_last: bool) -> None:
        """An attempt has ended. In a shutdown it ``is_last``, even where the nodes have reported that one follows.

        Each attempt that follows is an event of the kind "restart", which is public, also if it counts as none.
        """
        self.console.flush()
        if is_last:
            return
        if result.restart_follows:
            line, decision = failure_page.attempt_line(result), quote(result.decision, 1000)
            self.show(f"{line}{_late_ranks(result)}; {decision}", Level.NORMAL, "restart")
        elif result.attempt_follows and result.node_leaves:
            # Where each node has a launcher, only the coordinator has decided, and nothing was shown yet.
            effect = result.node_leaves if self._config.each_node_has_launcher else "starting the workers again"
            self.show(f"{failure_page.attempt_line(result)}; {quote(effect, 1000)}", Level.NORMAL, "restart")
        elif result.attempt_follows:
            self.show(f"{quote(result.reason, 1000)}; starting the workers again", Level.NORMAL, "restart")

    def has_page(self, result: RunResult, error: LaunchError | None) -> bool:
        """Whether ``run_ended`` shows the failure page; a node that is lost may have reported no attempt for it."""
        return failure_page.has_page(result, error, self._workers_ran or bool(result.attempts))

    def run_ended(
        self,
        result: RunResult,
        error: LaunchError | None,
        page_lines: Sequence[str] = (),
        report_lines: Sequence[str] = (),
        asked_again: Callable[[], int] = lambda: 0,
    ) -> None:
        """Write the report, and show the failure page or how the run ended.

        ``error`` says why the run ended. If no worker has run, there is no failure page: the command shows the error at
        last. ``page_lines`` are what features add to that page, ``report_lines`` what only report.txt has. Files are
        written by a thread, which is given up if a disk does not answer, or soon after the user has asked for the end:
        see ``_patience``.
        """
        page = partial(self._page, result, error, page_lines)
        is_given_up = _patience(asked_again)
        written = result_of("report", partial(self._write, result, page, report_lines), is_given_up, None)
        if written is None and self._folder:
            kept_files.note(self._folder / REPORT, TimeoutError(_GIVEN_UP))
        is_deleted, text = written or (False, page(has_report=False))
        if is_deleted:
            lost, self.console.logs = "its logs are lost, and there is no report", "no logs are left"
            folder = quote(str(self._folder), 1000)
            self.show(f"the run folder {folder} was deleted during the run: {lost}", Level.ALWAYS)
        self._show_result(result, error, text)
        if self._folder and not is_deleted:
            self._write_failures(result, self._folder, is_given_up)
            self._show_unwritten(self._folder)

    def _show_result(self, result: RunResult, error: LaunchError | None, page: str) -> None:
        others_show = self._config.each_node_has_launcher and not error and failure_page.is_shown_elsewhere(result)
        if page and others_show:
            self.show(failure_page.summary(result), Level.ALWAYS)
        elif page:
            self.console.show_page(page)
        elif error:
            self.console.note(f"ddplaunch: {error.text}")
        else:
            self._show_end(result)
        for injected in result.injections:
            self.show(f"inject {injected.text}: {injected.account}", Level.NORMAL)

    def _page(self, result: RunResult, error: LaunchError | None, more: Sequence[str], *, has_report: bool) -> str:
        """The failure page; empty if there is none."""
        if not self.has_page(result, error):
            return ""
        is_dry_run = self._config.dry_run
        options = {"is_remote": self._is_remote, "is_dry_run": is_dry_run, "has_report": has_report}
        return failure_page.page(result, more, error, **options)

    def _write(self, result: RunResult, page: Callable[..., str], report_lines: Sequence[str]) -> tuple[bool, str]:
        """In a thread: write the report. Returns whether the run folder was deleted, and the failure page."""
        is_deleted = self._folder is not None and _is_deleted(self._folder)
        if self._folder:
            report_files.write_report(result, self._folder)
        text = page(has_report=self._folder is not None and not kept_files.is_noted(self._folder / REPORT))
        if self._folder and text:
            report_files.write_page("\n".join((text, *map(escape, report_lines))), self._folder)
        report_files.write_error_file(result.first_failure, os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        return is_deleted, text

    def _write_failures(self, result: RunResult, folder: Path, is_given_up: Callable[[], bool]) -> None:
        """Of failed workers of other machines: for thousands of ranks it takes seconds."""
        if self._is_remote and result.attempts:
            write = partial(report_files.write_failures, result, folder)
            if not result_of("failed", lambda: write() is None, is_given_up, False):
                kept_files.note(folder / report_files.FAILED, TimeoutError(_GIVEN_UP))

    def _show_unwritten(self, folder: Path) -> None:
        """Show which files of the run folder are missing, and why."""
        if text := kept_files.not_written(folder):
            self.show(quote(text, 2000), Level.ALWAYS)

    def _show_end(self, result: RunResult) -> None:
        """Show how a run without a failure page ended."""
        is_unclean = bool(result.unkillable_pids or result.unreachable_hosts)
        leftovers = f"left: {failure_page.leftovers(result)}" if is_unclean else "every process of this run has ended"
        if result.outcome == "stopped" and not result.signal and result.attempts and result.attempts[-1].reason:
            self.show(f"stopped, {quote(result.attempts[-1].reason, 1000)}; {leftovers}", Level.ALWAYS)
        elif result.outcome == "stopped":
            self.show(f"stopped; {leftovers}", Level.ALWAYS if is_unclean else Level.NORMAL)
        else:
            time_s = result.duration_s
            took = f"{time_s:.1f} s" if time_s < _SHORT_S else duration(time_s)
            end = f"succeeded after {took}; {f'{leftovers}; ' if is_unclean else ''}{self.console.logs}"
            self.show(end, Level.ALWAYS if is_unclean else Level.NORMAL)

    def drain(self, result: RunResult, is_interrupted: Callable[[], bool]) -> None:
        """Wait until all output is written, or ``is_interrupted()``."""
        self.console.drain(is_interrupted, _STOPPED_STALL_S if result.signal else _STALL_S)

    def close(self) -> None:
        """Close the console; nothing can be shown afterwards."""
        self.console.close()


def _patience(asked_again: Callable[[], int]) -> Callable[[], bool]:
    """Returns a function: is it time to give up files? ``asked_again()``: how often the user has asked for the end."""
    deadline = time.monotonic() + _FILES_S

    def is_over() -> bool:
        nonlocal deadline
        count, now = asked_again(), time.monotonic()
        if count:
            deadline = min(deadline, now + _STOPPED_STALL_S)
        return count > 1 or now > deadline

    return is_over


def _is_deleted(folder: Path) -> bool:
    """Whether somebody has deleted the folder; not where its file system does not answer."""
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _late_ranks(result: AttemptResult) -> str:
    """For whom the first failure has waited, if that is why it has failed."""
    first = result.cause or first_failure.first_failure(result.exits)
    is_why = result.collectives and first is not None and first_failure.is_consequence(first)
    return f"; {quote(result.collectives[0], 1000)}" if is_why else ""


def where_logs(config: LaunchConfig, folder: Path | None) -> str:
    """Where the workers' output is kept."""
    if folder is None:
        return "no logs are kept"
    has_logs = config.output.collect_logs or config.is_local
    on_nodes = f"logs are on each node (ddplaunch --logs {quote(folder.name)} prints them), the report"
    return f"{'logs' if has_logs else on_nodes} in {folder}"


def dry_run_banner(config: LaunchConfig) -> str:
    """One line at the start of a dry run."""
    nodes = plural(min(len(config.hosts) or config.max_nodes, config.max_nodes), "simulated node")
    return f"dry run: {nodes} on this machine's CPU, gloo in place of NCCL, no GPU is used; results are a CPU's"
