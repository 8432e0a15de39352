"""What is told of runs that were found on some machines, and of their end. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddplaunch import run_marks
from ddplaunch.host_ranges import fold
from ddplaunch.remains import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddplaunch.remains import Kind, RunHere, RunsFound

_HEAD = ("run", "state", "hosts", "processes", "since", "memory")


def table(found: Mapping[str, RunsFound]) -> str:
    """One line per run, or two where an earlier one of that id has left something; ``found`` is by host."""
    led = {run.mark for here in found.values() for run in here.runs if run.is_led}
    groups: dict[tuple[str, str], list[tuple[str, RunHere]]] = {}
    for host, here in found.items():
        for run in here.runs:
            state = "runs" if run.mark in led else "left over"
            groups.setdefault((run_marks.id_of(run.mark), state), []).append((host, run))
    return _columns([_HEAD, *(_row(*key, groups[key]) for key in sorted(groups))])


def _row(run_id: str, state: str, parts: Sequence[tuple[str, RunHere]]) -> tuple[str, ...]:
    return (
        run_id,
        state,
        fold(host for host, _ in parts),
        counted(run for _, run in parts),
        f"{duration(max(run.age_s for _, run in parts))} ago",
        memory(sum(run.memory_bytes for _, run in parts)),
    )


def ids(found: Iterable[RunsFound]) -> list[str]:
    """Of all runs, in order."""
    return sorted({run_marks.id_of(run.mark) for here in found for run in here.runs})


def of_run(run_id: str, here: RunsFound) -> list[RunHere]:
    """What a machine has of the runs of this id, or of the run with this mark."""
    return [run for run in here.runs if run_id in run_marks.names(run.mark)]


def counted(runs: Iterable[RunHere]) -> str:
    """How many processes of each kind: ``1 agent, 8 workers, 2 others``."""
    sums: Counter[Kind] = Counter()
    for run in runs:
        sums.update(dict(run.counts))
    return ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind in KINDS if (count := sums[kind]))


def ended(run_id: str, before: Mapping[str, RunsFound], left: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A line for each thing that happened, with all hosts it holds for.

    ``before`` is what was found, ``left`` the pids that could not be ended, both by host.
    """
    hosts: dict[str, list[str]] = {}
    for host in left:
        runs = of_run(run_id, before[host])
        text = f"ended {counted(runs)}" if runs else ""
        if left[host]:
            text = f"had {counted(runs)}; pids {_listed(left[host])} could not be ended"
        hosts.setdefault(text, []).append(host)
    return [f"{fold(names)}: {text}" for text, names in hosts.items() if text]


def hidden(found: Mapping[str, RunsFound]) -> list[str]:
    """What could not be looked at, a line for all hosts that have as many; the pids where it is one host."""
    hosts: dict[int, list[str]] = {}
    for host, here in found.items():
        hosts.setdefault(len(here.hidden), []).append(host)
    return [
        f"{fold(names)}: {'a process' if count == 1 else f'{count} processes'} of yours may not be looked at"
        + (f" (pid {_listed(found[names[0]].hidden)})" if len(names) == 1 else "")
        for count, names in hosts.items()
        if count
    ]


def _listed(pids: Sequence[int]) -> str:
    shown = ", ".join(map(str, pids[:8]))
    return f"{shown} and {len(pids) - 8} more" if len(pids) > 8 else shown


def duration(seconds: float) -> str:
    """In the largest unit that it has two of."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def memory(size: int) -> str:
    """In MB, or GB where these are ten."""
    return f"{size / 2**20:.0f} MB" if size < 10 * 2**30 else f"{size / 2**30:.0f} GB"


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
