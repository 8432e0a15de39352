"""``--ps`` and ``--kill``: lists and ends this user's runs on this machine and on named hosts.

Runs in the process that the user started, which is no launcher of a run: an agent on every host finds the processes and
ends them.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ddplaunch.cluster.hosts import Host, fold
from ddplaunch.config import RemoteConfig
from ddplaunch.errors import NODE_NOT_READY, PROCESSES_LEFT, LaunchError, UsageError
from ddplaunch.features.ps.queries import ENDING_EXTRA_S, PROCESS_KINDS, EndRun, GpusFound, ListRuns, RunsFound
from ddplaunch.features.runs import run_folders
from ddplaunch.features.runs.asked_nodes import Queries, query_transport
from ddplaunch.protocol import environment
from ddplaunch.protocol.launcher_agent import AgentEnded
from ddplaunch.system import run_tags
from ddplaunch.text import KEEPER_ID, elapsed, grouped, plural, table
from ddplaunch.transport.failures import failures_table

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request
    from ddplaunch.features.ps.queries import ProcessKind, RunOnHost


_Found = TypeVar("_Found", RunsFound, GpusFound)
_END_S = 30.0
"""Time for an agent beyond the grace period; the agent's own limits add up to less."""

MAX_GRACE_S = 600.0
"""Limits --shutdown-timeout, which may be days for a run."""

_UNKILLABLE_HINT = (
    "A process that SIGKILL does not end waits in the kernel, for a disk or a GPU; `ps -o stat,wchan PID`."
)
_HEAD = ("run", "state", "script", "hosts", "processes", "memory")


def ps(request: Request) -> None:
    """List this user's runs on this machine and on the hosts.

    --verbose: also report processes that could not be inspected, such as the first process of a container.

    Raises:
        LaunchError: some hosts could not be queried; the results of the others have been shown.
    """
    with agents(request.hosts, request.remote) as queries:
        found = find_runs(queries)
        if ids(found.values()):
            request.show(run_table(found))
        else:
            where = "these hosts" if request.hosts else "this machine"
            request.report(f"no run of yours has a process on {where}")
        for line in hidden(found) if request.is_verbose else ():
            request.report(line)
        raise_failures(queries)


def kill(request: Request) -> None:
    """End the runs of an id on this machine and on the hosts, and report the ended processes.

    Ends them first on the machines that have a launcher of the run, then on the others. --verbose: as for ``ps``.

    Raises:
        LaunchError: a host could not be queried, or processes could not be ended; the others have been ended.
        UsageError: there is no such run.
    """
    run_id, report = run_folders.id_for("--kill", request.value, request.log_dir), request.report
    own_ids = run_tags.ids_of(os.environ.get(environment.RUN_ID, ""))
    if run_id in own_ids or (own_ids[0] and run_id == os.environ.get(environment.TORCHELASTIC_RUN_ID)):
        raise UsageError(f"--kill {run_id}: this command is a part of that run", "Use another terminal.")
    order = EndRun(run_id, max(0.0, min(request.grace_s, MAX_GRACE_S)))
    with agents(request.hosts, request.remote) as queries:
        found = find_runs(queries)
        parts = parts_of_run("--kill", run_id, queries, found)
        launchers = with_launcher(parts)
        report(
            f"ending {run_id} on each machine: SIGTERM, SIGKILL in {order.grace_s:g} s; in "
            f"{order.grace_s + ENDING_EXTRA_S:g} s for its launcher and agents"
        )
        _end_run(queries, order, launchers)
        _end_run(queries, order, parts.keys() - launchers)
        unkillable_pids: dict[str, tuple[int, ...]] = {
            machine.name: machine.answers[AgentEnded].unkillable_pids
            for machine in queries.nodes
            if AgentEnded in machine.answers and not machine.failure
        }
        for line in (*ended(run_id, found, unkillable_pids), *(hidden(found) if request.is_verbose else ())):
            report(line)
        if any(unkillable_pids.values()):
            raise LaunchError(f"some processes of {run_id} could not be ended", _UNKILLABLE_HINT, PROCESSES_LEFT)
        raise_failures(queries)


def _end_run(queries: Queries, order: EndRun, names: Collection[str]) -> None:
    """Have the machines of these names end a run, and wait for their answers."""
    machines = [machine for machine in queries.nodes if machine.name in names]
    queries.ask(machines, lambda _: order, AgentEnded, order.grace_s + _END_S)


# The machines that are asked, each by an agent: named hosts and this one, because the launcher of a run may be here.


@contextlib.contextmanager
def agents(hosts: Sequence[Host], remote: RemoteConfig, query: object = ListRuns()) -> Iterator[Queries]:
    """Start an agent on this machine and on each host, with its first query; the agents end with the ``with`` block.

    Raises:
        LaunchError: this machine cannot start an agent, or allows too few open files for so many hosts.
    """
    queries: Queries = Queries()
    here = query_transport((), RemoteConfig(), queries.post)
    others = [query_transport(hosts, remote, partial(queries.post, first=1))] if hosts else []
    with contextlib.ExitStack() as stack:
        for transport in (here, *others):
            stack.callback(transport.close)
        stack.callback(queries.close)
        for transport in (here, *others):
            queries.start(transport, query)
        yield queries


def find_runs(queries: Queries) -> dict[str, RunsFound]:
    """The runs on every machine by its name; a machine with two names is listed under the first."""
    return answers(queries, RunsFound)


def answers(queries: Queries, kind: type[_Found]) -> dict[str, _Found]:
    """The answers of this kind, each with a ``machine``, as ``find_runs``."""
    queries.wait(queries.nodes, kind)
    found: dict[str, _Found] = {}
    for machine in queries.nodes:
        answer: _Found | None = machine.answers.get(kind)
        if answer and answer.machine not in {each.machine for each in found.values()}:
            found[machine.name] = answer
    return found


def parts_of_run(
    option: str, run_id: str, queries: Queries, found: Mapping[str, RunsFound]
) -> dict[str, list[RunOnHost]]:
    """What each machine has of the run, by the machine's name.

    Raises:
        LaunchError: a machine could not be queried, and no other has a part of the run.
        UsageError: there is no such run.
    """
    parts = {name: of_run(run_id, runs) for name, runs in found.items()}
    if any(parts.values()):
        return parts
    raise_failures(queries)
    if run_id == KEEPER_ID:
        raise UsageError(f"{option} {run_id}: nothing is kept warm on the hosts that were queried", "See --keep-warm.")
    if (host := run_folders.host_of_launcher(run_id)) and host.split(".")[0] not in found:
        hint = f"There: ssh {host} ddplaunch {option} {run_id}. From here: --hosts {host}."
        raise UsageError(f"{option} {run_id}: its launcher is not on this machine but on {host}", hint)
    if run_folders.has_ended(run_id):
        hint = f"How it ended: ddplaunch --ps {run_id}"
        raise UsageError(f"{option} {run_id}: the run has ended, and no process of it is left here", hint)
    known = ids(found.values())
    hint = f"There are: {', '.join(known)}." if known else "There is no run at all. --hosts adds other hosts."
    raise UsageError(f"{option} {run_id}: no run of yours has this id on the hosts that were queried", hint)


def with_launcher(parts: Mapping[str, Sequence[RunOnHost]]) -> set[str]:
    """The names of the machines that have a launcher of the run."""
    return {name for name, runs in parts.items() if any(run.launchers for run in runs)}


def raise_failures(queries: Queries) -> None:
    """Raises LaunchError for machines without an answer."""
    failures = queries.failures()
    if failures:
        raise LaunchError(f"some hosts could not be queried\n{failures_table(failures)}", "", NODE_NOT_READY)


# The table of runs, and one line per result.


def run_table(found: Mapping[str, RunsFound]) -> str:
    """One line per run, two if an earlier run of the id left processes; ``found`` is by host."""
    alive = {run.run_tag for runs in found.values() for run in runs.runs if run.launcher_alive}

    def key(run: RunOnHost) -> tuple[str, str]:
        goes_on = "waiting" if run.waits else "running"
        state = "kept" if run.run_tag == KEEPER_ID else goes_on if run.run_tag in alive else "left over"
        return run.run_id, state

    groups = grouped((key(run), (host, run)) for host, runs in found.items() for run in runs.runs)
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

    def result(runs: Sequence[RunOnHost], pids: tuple[int, ...]) -> str:
        if pids:
            return f"had {counted(runs)}; pids {_listed(pids)} could not be ended"
        return f"ended {counted(runs)}" if runs else ""

    hosts = grouped((result(of_run(run_id, before[host]), pids), host) for host, pids in unkillable.items())
    return [f"{fold(names)}: {text}" for text, names in hosts.items() if text]


def hidden(found: Mapping[str, RunsFound]) -> list[str]:
    """Processes that could not be inspected: one line per number of them, with pids where it is one host."""
    hosts = grouped((len(runs.hidden_pids), host) for host, runs in found.items())
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
