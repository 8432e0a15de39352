"""The machines that ``--ps``, ``--kill`` and ``--stacks`` ask: this one and named hosts, each by an agent.

Runs in the process that the user started, which is no launcher of a run. This machine is always included, because the
run's launcher may be here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import display_names
from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.ps import ps_page as page
from ddplaunch.features.ps.queries import ListRuns, RunsFound
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher import setup
from ddplaunch.protocol.launcher_agent import AgentEnded
from ddplaunch.system.files import run_folders
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.text import KEEPER_ID
from ddplaunch.transport import agent_process
from ddplaunch.transport.failures import failures_table
from ddplaunch.transport.handle import ChannelClosed, discard_output
from ddplaunch.transport.local import LocalHandle
from ddplaunch.transport.queries import QueriedNode, Queries, first_deadline
from ddplaunch.transport.remote_start import RemoteStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import RemoteConfig
    from ddplaunch.features.ps.queries import RunOnHost
    from ddplaunch.transport.handle import AgentHandle, Post


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
    """Start an agent on this machine and on each host and request its runs; the agents end with the ``with`` block."""
    queries: Queries[QueriedHost] = Queries()
    with contextlib.ExitStack() as stack:
        starts: list[tuple[str, Callable[[Post], AgentHandle]]] = [(setup.local_host_name(), _start_here)]
        if hosts:
            connect = _connector(hosts, remote, stack)
            starts += [(name, partial(connect, host)) for name, host in zip(display_names(hosts), hosts, strict=True)]
        stack.callback(queries.close)
        for index, (name, start) in enumerate(starts):
            deadline = first_deadline(is_remote=index > 0)
            queries.nodes.append(QueriedHost(name, start(partial(queries.post, index)), deadline=deadline))
            queries.nodes[index].handle.send(ListRuns())
        yield queries


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


def _start_here(post: Post) -> AgentHandle:
    try:
        return LocalHandle(agent_process.start(os.environ), post, discard_output)
    except (OSError, RuntimeError) as error:
        raise LaunchError(f"an agent cannot be started here: {error}", NO_ROOM_HINT) from None


def _connector(
    hosts: Sequence[Host], remote: RemoteConfig, stack: contextlib.ExitStack
) -> Callable[[Host, Post], AgentHandle]:
    """A function that starts an agent on a host over SSH, without waiting; ``stack`` closes the connections."""
    from ddplaunch.transport.ssh import handle  # Loads paramiko.
    from ddplaunch.transport.ssh.handle import SshHandle

    connections = handle.connections(remote, len(hosts))
    stack.callback(connections.close)
    python, env = remote.python or sys.executable, dict(remote.environ)
    start = RemoteStart(python=python, cwd="/", env=env, setup=remote.setup, needs_torch=False)
    return lambda host, post: SshHandle(host, start, connections, post, discard_output)
