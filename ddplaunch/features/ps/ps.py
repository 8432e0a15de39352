"""``--ps`` and ``--kill``: lists and ends this user's runs on this machine and on named hosts.

Runs in the process that the user started, which is no launcher of a run: an agent on every host finds the processes and
ends them.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ddplaunch.errors import PROCESSES_LEFT, LaunchError, UsageError
from ddplaunch.features.ps import ps_page as page
from ddplaunch.features.ps.queries import ENDING_EXTRA_S, EndRun
from ddplaunch.features.ps.run_queries import agents, find_runs, parts_of_run, raise_failures, with_launcher
from ddplaunch.protocol import environment
from ddplaunch.system import run_tags

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import RemoteConfig
    from ddplaunch.features.ps.run_queries import QueriedHost
    from ddplaunch.transport.queries import Queries


_END_S = 30.0
"""Time for an agent beyond the grace period; the agent's own limits add up to less."""

MAX_GRACE_S = 600.0
"""Limits --shutdown-timeout, which may be days for a run."""


def ps(
    hosts: Sequence[Host],
    remote: RemoteConfig,
    show: Callable[[str], None],
    report: Callable[[str], None],
    *,
    is_verbose: bool,
) -> None:
    """List this user's runs on this machine and on ``hosts``: ``show`` prints the table, ``report`` the rest.

    ``is_verbose``: also report processes that could not be inspected, such as the first process of a container.

    Raises:
        LaunchError: some hosts could not be queried; the results of the others have been shown.
    """
    with agents(hosts, remote) as queries:
        found = find_runs(queries)
        if page.ids(found.values()):
            show(page.run_table(found))
        else:
            where = "these hosts" if hosts else "this machine"
            report(f"no run of yours has a process on {where}")
        for line in page.hidden(found) if is_verbose else ():
            report(line)
        raise_failures(queries)


def kill(
    run_id: str,
    grace_s: float,
    hosts: Sequence[Host],
    remote: RemoteConfig,
    report: Callable[[str], None],
    *,
    is_verbose: bool,
) -> None:
    """End the runs of this id on this machine and on ``hosts``, and report the ended processes.

    Ends them first on the machines that have a launcher of the run, then on the others. ``is_verbose``: as for ``ps``.

    Raises:
        LaunchError: a host could not be queried, or processes could not be ended; the others have been ended.
        UsageError: there is no such run.
    """
    own_ids = run_tags.ids_of(os.environ.get(environment.RUN_ID, ""))
    if run_id in own_ids or (own_ids[0] and run_id == os.environ.get(environment.TORCHELASTIC_RUN_ID)):
        raise UsageError(f"--kill {run_id}: this command is a part of that run", "Use another terminal.")
    order = EndRun(run_id, max(0.0, min(grace_s, MAX_GRACE_S)))
    with agents(hosts, remote) as queries:
        found = find_runs(queries)
        parts = parts_of_run("--kill", run_id, queries, found)
        launchers = with_launcher(parts)
        report(
            f"ending {run_id}: SIGTERM, then SIGKILL after at most {order.grace_s + ENDING_EXTRA_S:g} s on each machine"
        )
        _end_run(queries, order, launchers)
        _end_run(queries, order, parts.keys() - launchers)
        unkillable_pids = {
            machine.name: machine.unkillable_pids
            for machine in queries.nodes
            if machine.unkillable_pids is not None and not machine.failure
        }
        hidden = page.hidden(found) if is_verbose else ()
        for line in (*page.ended(run_id, found, unkillable_pids), *hidden):
            report(line)
        if any(unkillable_pids.values()):
            raise LaunchError(f"some processes of {run_id} could not be ended", _UNKILLABLE_HINT, PROCESSES_LEFT)
        raise_failures(queries)


_UNKILLABLE_HINT = (
    "A process that SIGKILL does not end waits in the kernel, for a disk or a GPU; `ps -o stat,wchan PID`."
)


def _end_run(queries: Queries[QueriedHost], order: EndRun, names: Collection[str]) -> None:
    """Have the machines of these names end a run, and wait for their answers."""
    machines = [machine for machine in queries.nodes if machine.name in names and not machine.failure]
    for machine in machines:
        machine.handle.send(order)
        machine.deadline = time.monotonic() + order.grace_s + _END_S
    queries.wait(machines, lambda machine: machine.unkillable_pids is not None)
