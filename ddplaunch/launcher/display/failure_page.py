"""The failure page: which rank failed first, how, why, and where its logs are.

Runs in the launcher, at the end of a run. Pure. Text of workers is escaped: it may contain terminal control sequences.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.cluster.hosts import fold
from ddplaunch.errors import INTERNAL, NODE_LOST, LaunchError
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.results import NO_RESTARTS_ALLOWED, AttemptResult, WorkerExit
from ddplaunch.text import clock, escape, fold_ints, grouped, quote, ranks

if TYPE_CHECKING:
    from ddplaunch.protocol.run_result import RunResult

_WIDTH = 80
_MAX_LINES = 60
_SHOWN_TAIL = 20
_MAX_COLUMNS = 1000
_REASON_COLUMNS = 160

_LOST_PEER = "lost a peer or did not reach it, as a consequence"
_HANG_HINT = "Look at what the rank does that the others wait for. If a step may take so long: --hang-timeout."
_EARLY_EXIT_HINT = "All ranks must make the same collective calls: look for an early exit or return, or uneven data."


def page(
    result: RunResult,
    more: Sequence[str] = (),
    error: LaunchError | None = None,
    *,
    is_remote: bool = False,
    is_dry_run: bool = False,
    has_report: bool = True,
) -> str:
    """The failure page of ``result``.

    ``more`` are lines of features (``Watch.page_lines``); they stand below why the job has failed. ``error`` is why the
    run has ended, if that is not how a worker or an attempt has. ``is_remote``: the logs are on the hosts, not on this
    machine. ``has_report``: report.json has been written.
    """
    attempt = result.attempts[-1] if result.attempts else None
    first = result.first_failure
    parts = [_rule("ddplaunch: the job failed")]
    early = _early_exits(attempt, first) if attempt else []
    if error:
        parts += [quote(error.message, _MAX_COLUMNS), *([""] if first else _collectives(attempt))]
    if first:
        parts += [*_headline(first), *_before(early, first), *_collectives(attempt), *_cause(first)]
    if attempt and not error and (reasons := _reasons(attempt)):
        parts += [*([""] if first else []), *reasons, *([] if first else _before(early, first))]
    parts += more
    if attempt:
        parts += ["", *_others(attempt, first)]
    parts += [*_attempts(result.attempts), *_files(result, attempt, first, is_remote, has_report)]
    hint = error.hint if error else _hint(attempt, first, early, is_dry_run)
    parts += [f"hint:     {hint}"] if hint else []
    parts += [f"left:     {leftovers(result)}", "=" * _WIDTH]
    return escape("\n".join(parts))


def has_page(result: RunResult, error: LaunchError | None, workers_ran: bool) -> bool:
    """Whether the end of the run is shown as a page: workers ran, and it has failed, not by a bug."""
    return result.outcome == "failed" and (error is None or (workers_ran and error.exit_code != INTERNAL))


def _hint(
    attempt: AttemptResult | None, first: WorkerExit | None, early: Sequence[WorkerExit], is_dry_run: bool
) -> str:
    if early:
        return _EARLY_EXIT_HINT
    if first:
        return next(filter(None, (module.hint(first, is_dry_run) for module in features.modules("hints"))), "")
    return _HANG_HINT if attempt and attempt.hung else ""


def _reasons(attempt: AttemptResult) -> list[str]:
    """Why the attempt ended, if no worker's failure ended it, and why no restart follows."""
    decision = "" if attempt.decision == NO_RESTARTS_ALLOWED else attempt.decision
    return [quote(text, _MAX_COLUMNS) for text in (attempt.reason, decision) if text]


def is_shown_elsewhere(result: RunResult) -> bool:
    """Where each node has a launcher: whether that of another node shows the page.

    Asked only without an error of this launcher, which it alone knows. It is the launcher of the rank that failed
    first; if no rank has failed, of rank 0. After the loss of a node each shows it: that of rank 0 may be gone, and no
    launcher knows who is left.
    """
    first = result.first_failure
    if first is None and result.exit_code == NODE_LOST:
        return False
    own = {exit_.rank for exit_ in result.attempts[-1].exits} if result.attempts else set()
    return bool(own) and (first.rank if first else 0) not in own


def summary(result: RunResult) -> str:
    """The failure in one line, for a launcher that does not show the page."""
    first, reasons = result.first_failure, _reasons(result.attempts[-1])
    if first:
        reasons = [failure_line(first), *reasons, f"the launcher on {first.host} shows the failure page"]
    report = [f"report of this node in {result.run_dir}"] if result.run_dir else []
    return "; ".join([*(reasons or ["the job failed"]), *report])


def _rule(title: str) -> str:
    return f" {title} ".center(_WIDTH, "=")


def _headline(first: WorkerExit) -> list[str]:
    # Two moments: ``time_s`` is that of its exception, after which it may have run for long.
    when = f"at {clock(first.time_s)}: {how(first)}; it ran for {first.duration_s:.1f} s"
    return [failure_line(first), f"{when} (local_rank {first.local_rank}, pid {first.pid})"]


def _early_exits(attempt: AttemptResult, first: WorkerExit | None) -> list[WorkerExit]:
    """Ranks that had ended with 0 when ``first`` missed a peer or the job hung: the probable cause."""
    if not attempt.hung and not (first and first_failure.is_consequence(first)):
        return []
    return [exit_ for exit_ in attempt.exits if exit_.returncode == 0 and not exit_.stopped]


def _before(early: Sequence[WorkerExit], first: WorkerExit | None) -> list[str]:
    if not early:
        return []
    others = f" (and {ranks(exit_.rank for exit_ in early[1:])})" if early[1:] else ""
    who = f"rank {early[0].rank} on {early[0].host}{others}"
    # Clocks of two machines are not compared.
    earlier_s = first.time_s - early[0].time_s if first and first.host == early[0].host else 0.0
    when = f", {_duration(earlier_s)} earlier" if earlier_s > 0 else ""
    return [f"before: {who} ended with exit code 0{when}, while others went on: the probable cause"]


def _collectives(attempt: AttemptResult | None) -> list[str]:
    sentences = [quote(text, _MAX_COLUMNS) for text in attempt.collectives] if attempt else []
    return [f"{'' if number else 'waiting:':9} {text}" for number, text in enumerate(sentences)]


def _duration(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms" if duration_s < 1 else f"{duration_s:.1f} s"


def failure_line(exit_: WorkerExit) -> str:
    """A worker's failure in one line: ``rank 1 on node1 failed: KeyError: 'lr' (train.py:4)``."""
    return f"rank {exit_.rank} on {exit_.host} {failure(exit_)}"


def failure(exit_: WorkerExit) -> str:
    """What a worker did, and why: ``failed: KeyError: 'lr' (train.py:4)``."""
    if exit_.hardware:
        return f"failed: {quote(exit_.hardware, _MAX_COLUMNS)}"
    if exit_.give_up:
        return f"gave up: {quote(exit_.give_up, _MAX_COLUMNS)}"
    if exit_.avoid_node:
        return f"asked to avoid its node: {quote(exit_.avoid_node, _MAX_COLUMNS)}"
    return f"failed: {_reason(exit_)}"


def _reason(exit_: WorkerExit) -> str:
    """The exception, or how it ended and the last error of its output; and the line of the script, if it is known."""
    headline = first_failure.headline(exit_.error.message) if exit_.error else ""
    if exit_.error and headline:
        line = first_failure.raised_at(exit_.error.traceback)
    else:
        headline, line = _end_without_exception(exit_), first_failure.crashed_at(exit_)
    return headline[:_REASON_COLUMNS] + (f" ({line})" if line else "")


def _end_without_exception(exit_: WorkerExit) -> str:
    """``how``, and the last error of its output, unless a signal from outside has ended it."""
    ended_itself = exit_.returncode in (*range(1, 256), -signal.SIGABRT)
    return ": ".join(filter(None, (how(exit_), first_failure.last_error(exit_) if ended_itself else "")))


def how(exit_: WorkerExit) -> str:
    """How a worker ended: its exit code or signal, and whether memory or our stop was the cause."""
    if exit_.ended_by_stop:
        return f"stopped by ddplaunch ({first_failure.describe(exit_.returncode)}) after its exception"
    if exit_.out_of_memory != "no":
        return f"SIGKILL, {first_failure.KILLED_FOR_MEMORY[exit_.out_of_memory]}"
    return first_failure.describe(exit_.returncode)


def _cause(first: WorkerExit) -> list[str]:
    if first.error and first.error.traceback:
        return ["", *_quoted(first.error.traceback.splitlines())]
    lines = ["", *_quoted(first.error.message.splitlines())] if first.error else []
    if first.tail:
        return [*lines, "", "its last lines:", *_quoted(first.tail[-_SHOWN_TAIL:])]
    return [*lines, "", "none of its output was logged."]


def _quoted(lines: Iterable[str]) -> list[str]:
    lines = [f"  | {_cut(part)}" for line in lines for part in line.split("\n")]
    if len(lines) <= _MAX_LINES:
        return lines
    half = _MAX_LINES // 2
    return [*lines[:half], f"  | ... {len(lines) - 2 * half} lines, see the log", *lines[-half:]]


def _cut(line: str) -> str:
    return (
        line if len(line) <= _MAX_COLUMNS else f"{line[:_MAX_COLUMNS]} ... {len(line) - _MAX_COLUMNS} more characters"
    )


def _others(attempt: AttemptResult, first: WorkerExit | None) -> list[str]:
    failed = [exit_ for exit_ in first_failure.failures(attempt.exits) if first is None or exit_.rank != first.rank]
    by_kind = grouped((_LOST_PEER if is_victim(exit_, first) else _kind(exit_), exit_) for exit_ in failed)
    lost = [exit_.rank for exit_ in by_kind.pop(_LOST_PEER, [])]
    lines = [f"then:     {ranks(lost)} {_LOST_PEER}"] if lost else []
    groups = list(by_kind.values())
    lines += [f"then:     {_group_line(group, first)}" for group in groups[:8]]
    if len(groups) > 8:
        more = [exit_.rank for group in groups[8:] for exit_ in group]
        lines.append(f"then:     {len(more)} more ranks: {ranks(more)}")
    stopped = [exit_.rank for exit_ in attempt.exits if exit_.stopped]
    if stopped:
        lines.append(f"stopped:  {ranks(stopped)} (by ddplaunch, because of the failure)")
    return lines


def is_victim(exit_: WorkerExit, first: WorkerExit | None) -> bool:
    """Whether it failed for lack of a peer, such as ``first``, which has another reason."""
    return first_failure.is_consequence(exit_) and not (first and first_failure.is_consequence(first))


def _kind(exit_: WorkerExit) -> str:
    """The reason, without the numbers of an exception's message: they are often ports and ranks."""
    if exit_.hardware:
        return exit_.hardware
    return re.sub(r"\d+", "0", _reason(exit_)) if exit_.error else how(exit_)


def _group_line(group: list[WorkerExit], first: WorkerExit | None) -> str:
    if first and _kind(first) == _kind(group[0]):
        return f"{ranks(exit_.rank for exit_ in group)} failed in the same way"
    also = [exit_.rank for exit_ in group[1:]]
    return failure_line(group[0]) + (f"; {ranks(also)}: the same" if also else "")


def attempt_line(attempt: AttemptResult) -> str:
    """One line on a failed attempt; not escaped."""
    first = attempt.cause or first_failure.first_failure(attempt.exits)
    return failure_line(first) if first else quote(attempt.reason, _MAX_COLUMNS)


def _attempts(attempts: tuple[AttemptResult, ...]) -> list[str]:
    if len(attempts) < 2:
        return []
    lines = grouped((attempt_line(attempt), attempt.attempt) for attempt in attempts)
    return [f"attempt{'s' * (len(same) > 1)} {fold_ints(same)}: {line}" for line, same in lines.items()]


def _files(
    result: RunResult, attempt: AttemptResult | None, first: WorkerExit | None, is_remote: bool, has_report: bool
) -> list[str]:
    lines = []
    if first and first.log_file:
        lines.append(f"log:      {f'{first.host}:' if is_remote else ''}{quote(first.log_file, _MAX_COLUMNS)}")
    elif attempt and (folder := _log_folder(attempt)):
        where = " on each host" if is_remote else ""
        lines.append(f"logs:     {quote(folder, _MAX_COLUMNS)}{where}")
    if result.run_dir:
        path = f"{quote(result.run_dir, _MAX_COLUMNS)}/report.json"
        lines.append(f"report:   {path if has_report else f'could not be written to {path}'}")
    return lines


def _log_folder(attempt: AttemptResult) -> str:
    """The folder with the logs of all workers of ``attempt``; empty if none are kept, or in folders of other shapes."""
    folders = {os.path.dirname(os.path.dirname(exit_.log_file)) for exit_ in attempt.exits if exit_.log_file}
    if len(folders) < 2:
        return next(iter(folders), "")
    runs = {os.path.dirname(os.path.dirname(folder)) for folder in folders}
    names = {os.path.basename(folder) for folder in folders}
    return os.path.join(*runs, "*", *names) if len(runs) == len(names) == 1 else ""


def leftovers(result: RunResult) -> str:
    """Processes that survived SIGKILL, and hosts that could not be checked."""
    parts = []
    if result.unkillable_pids:
        parts.append(f"pids {', '.join(map(str, result.unkillable_pids))} could not be killed (uninterruptible sleep?)")
    if result.unreachable_hosts:
        parts.append(f"unknown on {fold(result.unreachable_hosts)}, which could not be reached; check again with --ps")
    return "; ".join(parts) or "nothing; every process of this run has ended"
