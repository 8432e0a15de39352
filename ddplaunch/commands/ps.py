"""``--ps`` and ``--kill``: lists and ends this user's runs on this machine and on named hosts.

Runs in the process that the user started, which is no launcher of a run: an agent on every host finds the processes and
ends them. This machine is always included, because the run's launcher may be here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import display_names
from ddplaunch.commands import ps_page as page
from ddplaunch.commands.query import QueriedNode, Queries, first_deadline
from ddplaunch.errors import NODE_NOT_READY, PROCESSES_LEFT, LaunchError, UsageError
from ddplaunch.launcher import setup
from ddplaunch.protocol import environment
from ddplaunch.protocol.launcher_agent import AgentEnded
from ddplaunch.protocol.queries import ENDING_EXTRA_S, EndRun, ListRuns, RunsFound
from ddplaunch.system import run_tags
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.transport import agent_process
from ddplaunch.transport.failures import failures_table
from ddplaunch.transport.handle import ChannelClosed, discard_output
from ddplaunch.transport.local import LocalHandle
from ddplaunch.transport.remote_start import RemoteStart

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import RemoteConfig
    from ddplaunch.transport.handle import AgentHandle, Post


_END_S = 30.0
"""Time for an agent beyond the grace period; the agent's own limits add up to less."""

MAX_GRACE_S = 600.0
"""Limits --shutdown-timeout, which may be days for a run."""


@dataclass
class _QueriedHost(QueriedNode):
    """A machine with an agent; ``unkillable_pids`` is None until the agent has answered an EndRun."""

    runs: RunsFound | None = None
    unkillable_pids: tuple[int, ...] | None = None

    def handle_event(self, event: object, received_s: float) -> None:
        """Store an answer of the agent."""
        match event:
            case RunsFound():
                self.runs = event
            case AgentEnded(unkillable_pids=unkillable_pids):
                self.unkillable_pids = unkillable_pids
            case ChannelClosed() if self.runs and self.unkillable_pids is not None:
                pass  # The agent ends after its answer.
            case _:
                super().handle_event(event, received_s)


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
    with _agents(hosts, remote) as queries:
        found = _find_runs(queries)
        if page.ids(found.values()):
            show(page.run_table(found))
        else:
            where = "these hosts" if hosts else "this machine"
            report(f"no run of yours has a process on {where}")
        for line in page.hidden(found) if is_verbose else ():
            report(line)
        _raise_failures(queries)


def kill(
    run_id: str, grace_s: float, hosts: Sequence[Host], remote: RemoteConfig, report: Callable[[str], None]
) -> None:
    """End the runs of this id on this machine and on ``hosts``, and report the ended processes.

    Ends them first on the machines that have a launcher of the run, then on the others.

    Raises:
        LaunchError: a host could not be queried, or processes could not be ended; the others have been ended.
        UsageError: there is no such run.
    """
    own_ids = run_tags.ids_of(os.environ.get(environment.RUN_ID, ""))
    if run_id in own_ids or (own_ids[0] and run_id == os.environ.get(environment.TORCHELASTIC_RUN_ID)):
        raise UsageError(f"--kill {run_id}: this command is a part of that run", "Use another terminal.")
    order = EndRun(run_id, max(0.0, min(grace_s, MAX_GRACE_S)))
    with _agents(hosts, remote) as queries:
        found = _find_runs(queries)
        parts = {name: page.of_run(run_id, runs) for name, runs in found.items()}
        if not any(parts.values()):
            _raise_failures(queries)
            raise _unknown_run(run_id, page.ids(found.values()))
        launchers = {name for name, runs in parts.items() if any(dict(run.counts).get("launcher") for run in runs)}
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
        for line in (*page.ended(run_id, found, unkillable_pids), *page.hidden(found)):
            report(line)
        if any(unkillable_pids.values()):
            raise LaunchError(f"some processes of {run_id} could not be ended", _UNKILLABLE_HINT, PROCESSES_LEFT)
        _raise_failures(queries)


_UNKILLABLE_HINT = (
    "A process that SIGKILL does not end waits in the kernel, for a disk or a GPU; `ps -o stat,wchan PID`."
)


def _unknown_run(run_id: str, known: Sequence[str]) -> UsageError:
    hint = f"There are: {', '.join(known)}." if known else "There is no run at all. --hosts adds other hosts."
    return UsageError(f"--kill {run_id}: no run of yours has this id on the hosts that were queried", hint)


def _find_runs(queries: Queries[_QueriedHost]) -> dict[str, RunsFound]:
    """The runs on every machine by its name; a machine with two names is listed under the first."""
    queries.wait(queries.nodes, lambda machine: machine.runs is not None)
    found: dict[str, RunsFound] = {}
    for machine in queries.nodes:
        if machine.runs and machine.runs.machine not in {runs.machine for runs in found.values()}:
            found[machine.name] = machine.runs
    return found


def _end_run(queries: Queries[_QueriedHost], order: EndRun, names: Collection[str]) -> None:
    """Have the machines of these names end a run, and wait for their answers."""
    machines = [machine for machine in queries.nodes if machine.name in names and not machine.failure]
    for machine in machines:
        machine.handle.send(order)
        machine.deadline = time.monotonic() + order.grace_s + _END_S
    queries.wait(machines, lambda machine: machine.unkillable_pids is not None)


def _raise_failures(queries: Queries[_QueriedHost]) -> None:
    """Raises LaunchError for machines without an answer."""
    failures = queries.failures()
    if failures:
        raise LaunchError(f"some hosts could not be queried\n{failures_table(failures)}", "", NODE_NOT_READY)


@contextlib.contextmanager
def _agents(hosts: Sequence[Host], remote: RemoteConfig) -> Iterator[Queries[_QueriedHost]]:
    """Start an agent on this machine and on each host and request its runs; the agents end with the ``with`` block."""
    queries: Queries[_QueriedHost] = Queries()
    with contextlib.ExitStack() as stack:
        starts: list[tuple[str, Callable[[Post], AgentHandle]]] = [(setup.local_host_name(), _start_here)]
        if hosts:
            connect = _connector(hosts, remote, stack)
            starts += [(name, partial(connect, host)) for name, host in zip(display_names(hosts), hosts, strict=True)]
        stack.callback(queries.close)
        for index, (name, start) in enumerate(starts):
            deadline = first_deadline(is_remote=index > 0)
            queries.nodes.append(_QueriedHost(name, start(partial(queries.post, index)), deadline=deadline))
            queries.nodes[index].handle.send(ListRuns())
        yield queries


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
