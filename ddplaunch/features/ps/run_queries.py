"""The machines that ``--ps``, ``--kill`` and ``--stacks`` ask: this one and named hosts, each by an agent.

Runs in the process that the user started, which is no launcher of a run. This machine is always included, because the
run's launcher may be here.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.config import RemoteConfig
from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.ps import ps_page as page
from ddplaunch.features.ps.queries import ListRuns, RunsFound
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher import setup
from ddplaunch.protocol.launcher_agent import AgentEnded
from ddplaunch.system.files import run_folders
from ddplaunch.text import KEEPER_ID
from ddplaunch.transport.failures import failures_table
from ddplaunch.transport.handle import ChannelClosed, FromNode
from ddplaunch.transport.queries import QueriedNode, Queries, first_deadline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddplaunch.cluster.hosts import Host
    from ddplaunch.features.ps.queries import RunOnHost


@dataclass
class QueriedHost(QueriedNode):
    """A machine with an agent."""

    @property
    def runs(self) -> RunsFound | None:
        """The answer to ListRuns."""
        return self.answers.get(RunsFound)

    @property
    def unkillable_pids(self) -> tuple[int, ...] | None:
        """The answer to EndRun."""
        ended: AgentEnded | None = self.answers.get(AgentEnded)
        return None if ended is None else ended.unkillable_pids

    def handle_event(self, event: object, received_s: float) -> None:
        """Store an answer of the agent, which ends after the last one."""
        if not (isinstance(event, ChannelClosed) and self.answers.keys() >= {RunsFound, AgentEnded}):
            super().handle_event(event, received_s)


@contextlib.contextmanager
def agents(hosts: Sequence[Host], remote: RemoteConfig) -> Iterator[Queries[QueriedHost]]:
    """Start an agent on this machine and on each host and request its runs; the agents end with the ``with`` block.

    Raises:
        LaunchError: this machine cannot start an agent, or allows too few open files for so many hosts.
    """
    queries: Queries[QueriedHost] = Queries()
    here = setup.query_transport((), RemoteConfig(), partial(_post, queries, 0))
    others = [setup.query_transport(hosts, remote, partial(_post, queries, 1))] if hosts else []
    with contextlib.ExitStack() as stack:
        for transport in (here, *others):
            stack.callback(transport.close)
        stack.callback(queries.close)
        for transport in (here, *others):
            for index, name in enumerate(transport.node_names):
                deadline = first_deadline(is_remote=transport.is_remote)
                queries.nodes.append(QueriedHost(name, transport.query(index), deadline=deadline))
                queries.nodes[-1].handle.send(ListRuns())
        yield queries


def _post(queries: Queries[QueriedHost], first: int, event: object) -> None:
    """Post an event of a transport whose nodes begin at number ``first``. Any thread."""
    if isinstance(event, FromNode):
        queries.post(first + event.index, event.event)


def find_runs(queries: Queries[QueriedHost]) -> dict[str, RunsFound]:
    """The runs on every machine by its name; a machine with two names is listed under the first."""
    queries.wait(queries.nodes, lambda machine: machine.runs is not None)
    found: dict[str, RunsFound] = {}
    for machine in queries.nodes:
        if machine.runs and machine.runs.machine not in {runs.machine for runs in found.values()}:
            found[machine.name] = machine.runs
    return found


def parts_of_run(
    option: str, run_id: str, queries: Queries[QueriedHost], found: Mapping[str, RunsFound]
) -> dict[str, list[RunOnHost]]:
    """What each machine has of the run, by the machine's name.

    Raises:
        LaunchError: a machine could not be queried, and no other has a part of the run.
        UsageError: there is no such run.
    """
    parts = {name: page.of_run(run_id, runs) for name, runs in found.items()}
    if any(parts.values()):
        return parts
    raise_failures(queries)
    if run_id == KEEPER_ID:
        raise UsageError(f"{option} {run_id}: nothing is kept warm on the hosts that were queried", "See --keep-warm.")
    if (host := run_folders.host_of_launcher(run_id)) and host.split(".")[0] not in found:
        hint = f"There: ssh {host} ddplaunch {option} {run_id}. From here: --hosts {host}."
        raise UsageError(f"{option} {run_id}: its launcher is not on this machine but on {host}", hint)
    known = page.ids(found.values())
    hint = f"There are: {', '.join(known)}." if known else "There is no run at all. --hosts adds other hosts."
    raise UsageError(f"{option} {run_id}: no run of yours has this id on the hosts that were queried", hint)


def with_launcher(parts: Mapping[str, Sequence[RunOnHost]]) -> set[str]:
    """The names of the machines that have a launcher of the run."""
    return {name for name, runs in parts.items() if any(run.launchers for run in runs)}


def raise_failures(queries: Queries[QueriedHost]) -> None:
    """Raises LaunchError for machines without an answer."""
    failures = queries.failures()
    if failures:
        raise LaunchError(f"some hosts could not be queried\n{failures_table(failures)}", "", NODE_NOT_READY)
