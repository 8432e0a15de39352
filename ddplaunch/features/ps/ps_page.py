"""Text of ``--ps`` and ``--kill``: the table of runs, and one line per result. Pure; runs in the launcher."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddplaunch.cluster.hostlist import fold
from ddplaunch.features.ps.queries import PROCESS_KINDS
from ddplaunch.system import run_tags
from ddplaunch.text import KEEPER_ID, elapsed, plural, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddplaunch.features.ps.queries import ProcessKind, RunOnHost, RunsFound

_HEAD = ("run", "state", "script", "hosts", "processes", "memory")


def run_table(found: Mapping[str, RunsFound]) -> str:
    """One line per run, two if an earlier run of the id left processes; ``found`` is by host."""
    alive = {run.run_tag for runs in found.values() for run in runs.runs if run.launcher_alive}
    groups: dict[tuple[str, str], list[tuple[str, RunOnHost]]] = {}
    for host, runs in found.items():
        for run in runs.runs:
            state = "kept" if run.run_tag == KEEPER_ID else "running" if run.run_tag in alive else "left over"
            groups.setdefault((run.run_id, state), []).append((host, run))
    return "\n".join(table([_HEAD, *(_row(*key, groups[key]) for key in sorted(groups))]))


def _row(run_id: str, state: str, parts: Sequence[tuple[str, RunOnHost]]) -> tuple[str, ...]:
    return (
        run_id,
        f"{state} {elapsed(max(run.age_s for _, run in parts))}",
        next((run.script for _, run in parts if run.script), "?"),
        fold(host for host, _ in parts),
        counted(run for _, run in parts),
        memory(sum(run.memory_bytes for _, run in parts)),
    )


def ids(found: Iterable[RunsFound]) -> list[str]:
    """Ids of all runs, sorted."""
    return sorted({run.run_id for runs in found for run in runs.runs})


def of_run(run_id: str, found: RunsFound) -> list[RunOnHost]:
    """The runs of this id, or the run with this run tag, on one machine."""
    return [run for run in found.runs if run_id in (run.run_id, *run_tags.ids_of(run.run_tag))]


def counted(runs: Iterable[RunOnHost]) -> str:
    """Number of processes of each kind: ``1 agent, 8 workers, 2 others``."""
    sums: Counter[ProcessKind] = Counter()
    for run in runs:
        sums.update(dict(run.counts))
    return ", ".join(plural(count, kind) for kind in PROCESS_KINDS if (count := sums[kind]))


def ended(run_id: str, before: Mapping[str, RunsFound], unkillable: Mapping[str, tuple[int, ...]]) -> list[str]:
    """One line per result, with all hosts that have it.

    ``before`` holds what was found, ``unkillable`` the pids that could not be ended, both by host.
    """
    hosts: dict[str, list[str]] = {}
    for host, pids in unkillable.items():
        runs = of_run(run_id, before[host])
        text = f"ended {counted(runs)}" if runs else ""
        if pids:
            text = f"had {counted(runs)}; pids {_listed(pids)} could not be ended"
        hosts.setdefault(text, []).append(host)
    return [f"{fold(names)}: {text}" for text, names in hosts.items() if text]


def hidden(found: Mapping[str, RunsFound]) -> list[str]:
    """Processes that could not be inspected: one line per number of them, with pids where it is one host."""
    hosts: dict[int, list[str]] = {}
    for host, runs in found.items():
        hosts.setdefault(len(runs.hidden_pids), []).append(host)
    return [
        f"{fold(names)}: {'a process' if count == 1 else f'{count} processes'} of yours could not be inspected"
        + (f" (pid {_listed(found[names[0]].hidden_pids)})" if len(names) == 1 else "")
        for count, names in hosts.items()
        if count
    ]


def _listed(pids: Sequence[int]) -> str:
    first = ", ".join(map(str, pids[:8]))
    return f"{first} and {len(pids) - 8} more" if len(pids) > 8 else first


def memory(size: int) -> str:
    """In MB, from 10 GB on in GB."""
    return f"{size / 2**20:.0f} MB" if size < 10 * 2**30 else f"{size / 2**30:.0f} GB"
