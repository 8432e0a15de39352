"""The page a failed run ends with. Pure."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

from ddplaunch import stacks, verdict
from ddplaunch.host_ranges import fold
from ddplaunch.printable import printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.model import AttemptResult, RunResult, WorkerExit

_WIDTH = 80
_MAX_LINES = 60
_SHOWN_TAIL = 20
_MAX_COLUMNS = 1000
_MAX_SEARCHED = 20_000
_MAX_PLACES = 12
_PLACE_COLUMNS = 200

_HINTS = (
    (
        r"ddplaunch: .* needs a real GPU",
        "README lists what a dry run rehearses; try this part on a machine with GPUs.",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError",
        "The GPU's memory is full: lower the batch size, or see who else uses it.",
    ),
    (r"EADDRINUSE|Address already in use", "Something else listens there: leave out --master-port, or stop it."),
    (r"No module named", "The module is not installed for the interpreter that ran the script."),
    (r"invalid device ordinal", "More workers than GPUs: lower --nproc-per-node, or look at CUDA_VISIBLE_DEVICES."),
    (r"unrecognized arguments: --local[-_]rank", "Take out --pass-local-rank: this script reads LOCAL_RANK."),
    (r"NCCL|nccl", "Set NCCL_DEBUG=INFO to hear more from NCCL."),
    (r"DataLoader worker .* (killed|exited)", "A DataLoader worker died: often too little /dev/shm or memory."),
    (r"Too many open files", "Raise the limit: ulimit -n."),
    (r"No space left on device", "A disk is full, or /dev/shm is."),
)


def page(result: RunResult, *, is_remote: bool = False) -> str:
    """What happened, for a person: who failed first, why, who else, where to look.

    ``is_remote``: the logs are on the hosts.
    """
    attempt = result.attempts[-1] if result.attempts else None
    first = result.first_failure
    parts = [_rule("ddplaunch: the job failed")]
    if first:
        parts += [*_headline(first), *_cause(first)]
    if attempt and attempt.note:
        parts += ["", attempt.note]
    if attempt:
        parts += [*_whereabouts(attempt), "", *_others(attempt, first)]
    parts += [*_earlier(result.attempts), *_places(result, first, is_remote)]
    parts += [f"hint:     {hint}" for hint in _hints(first)]
    parts += [f"left:     {left(result)}", "=" * _WIDTH]
    return "\n".join(parts)


def _rule(title: str) -> str:
    return f" {title} ".center(_WIDTH, "=")


def _headline(first: WorkerExit) -> list[str]:
    who = f"rank {first.rank} (local_rank {first.local_rank}, pid {first.pid}) on {first.host}"
    return [
        f"{who} failed first,",
        f"at {_clock(first.time_s)}, {first.duration_s:.1f} s after its start: {how(first)}",
    ]


def _clock(time_s: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s % 1 * 1000):03d}"
    except (ValueError, OverflowError, OSError):  # An error file's date is whatever its writer made it.
        return "an unknown time"


def how(exit_: WorkerExit) -> str:
    """How a worker ended, in words: its exit code, or its signal and what that usually means."""
    if exit_.out_of_memory != "no":
        return f"SIGKILL, {verdict.KILLED_FOR_MEMORY[exit_.out_of_memory]}"
    return verdict.describe(exit_.returncode)


def _cause(first: WorkerExit) -> list[str]:
    if first.error and first.error.traceback:
        return ["", *_quoted(first.error.traceback.splitlines())]
    lines = ["", *_quoted(first.error.message.splitlines())] if first.error else []
    if first.tail:
        return [*lines, "", "its last lines:", *_quoted(first.tail[-_SHOWN_TAIL:])]
    return [*lines, "", "it wrote nothing that was logged."]


def _quoted(lines: Iterable[str]) -> list[str]:
    lines = [f"  | {printable(_cut(line))}" for line in lines]
    if len(lines) <= _MAX_LINES:
        return lines
    half = _MAX_LINES // 2
    return [*lines[:half], f"  | ... {len(lines) - 2 * half} lines, see the log", *lines[-half:]]


def _cut(line: str) -> str:
    return (
        line if len(line) <= _MAX_COLUMNS else f"{line[:_MAX_COLUMNS]} ... {len(line) - _MAX_COLUMNS} more characters"
    )


def _others(attempt: AttemptResult, first: WorkerExit | None) -> list[str]:
    failed = [exit_ for exit_ in verdict.failures(attempt.exits) if first is None or exit_.rank != first.rank]
    lines = [f"then:     rank {e.rank} on {e.host}: {_brief(e)}" for e in failed[:8]]
    if len(failed) > 8:
        lines.append(f"then:     {len(failed) - 8} more ranks: {ranks(e.rank for e in failed[8:])}")
    stopped = [exit_.rank for exit_ in attempt.exits if exit_.stopped]
    if stopped:
        lines.append(f"stopped:  {ranks(stopped)} (by ddplaunch, because of the failure)")
    return lines


def _whereabouts(attempt: AttemptResult) -> list[str]:
    """Of a job that hung: ranks by where they were, the fewest first, since who is elsewhere than most is suspect."""
    places: dict[str, list[int]] = {}
    for exit_ in attempt.exits:
        places.setdefault(exit_.whereabouts or "unknown", []).append(exit_.rank)
    if not attempt.hung or set(places) <= {"unknown"}:
        return []
    found = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"  {ranks(numbers)}: {shown(place, _PLACE_COLUMNS)}" for place, numbers in found[:_MAX_PLACES]]
    if len(found) > _MAX_PLACES:
        lines.append(f"  {len(found) - _MAX_PLACES} more places")
    return ["", f"Where the ranks were, whole stacks in each rank's {stacks.FILE}:", *lines]


def _brief(exit_: WorkerExit) -> str:
    lines = exit_.error.message.strip().splitlines() if exit_.error else []
    message = printable(lines[0][:160]) if lines else ""
    if message and exit_.returncode == -signal.SIGTERM:  # Ours, while it was on its way out.
        return message
    return f"{how(exit_)}: {message}" if message else how(exit_)


def ranks(numbers: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def attempt_line(attempt: AttemptResult) -> str:
    """One line on a failed attempt."""
    first = attempt.cause or verdict.first_failure(attempt.exits)
    return f"rank {first.rank} on {first.host}: {_brief(first)}" if first else attempt.note


def _earlier(attempts: tuple[AttemptResult, ...]) -> list[str]:
    if len(attempts) < 2:
        return []
    return [f"attempt {a.attempt}: {attempt_line(a)}" for a in attempts]


def _places(result: RunResult, first: WorkerExit | None, is_remote: bool) -> list[str]:
    lines = []
    if first and first.log_file:
        lines.append(f"log:      {f'{first.host}:' if is_remote else ''}{first.log_file}")
    if result.run_dir:
        lines.append(f"report:   {result.run_dir}/report.json")
    return lines


def _hints(first: WorkerExit | None) -> list[str]:
    if first is None:
        return []
    if first.out_of_memory == "perhaps":
        return ["If it was the kernel, `dmesg` names the process; else it was somebody's kill or a job scheduler."]
    if first.out_of_memory == "yes":
        return ["Use less memory per worker (batch size, DataLoader workers), or fewer workers."]
    text = "\n".join((first.error.message[:_MAX_SEARCHED] if first.error else "", *first.tail))
    found = [hint for pattern, hint in _HINTS if re.search(pattern, text)]
    if not found and first.returncode == -9:
        found = ["SIGKILL came from outside: somebody's kill, a job scheduler, or a container's memory limit."]
    return found[:1]


def left(result: RunResult) -> str:
    """What may still be there of the run."""
    parts = []
    if result.left:
        parts.append(f"pids {', '.join(map(str, result.left))} could not be ended (uninterruptible sleep?)")
    if result.unasked:
        parts.append(f"unknown on {fold(result.unasked)}, which could not be asked; --ps asks again")
    return "; ".join(parts) or "nothing; every process of this run is gone"
