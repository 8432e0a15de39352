"""``--ps`` and ``--kill``: what runs have on this machine and on others, and the end of it.

An agent on every machine looks, and ends what it is told to. This machine is always asked: the launcher may be here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch import environ, run_marks
from ddplaunch.errors import LEFT_RUNNING, NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.launcher import agent_process, asking, preparation
from ddplaunch.launcher import remains_page as page
from ddplaunch.launcher.asking import Asked
from ddplaunch.launcher.failures import NO_ROOM_HINT, failures_table
from ddplaunch.launcher.handles import AgentLost
from ddplaunch.launcher.local import LocalHandle
from ddplaunch.launcher.remote import RemoteStart
from ddplaunch.mailbox import Mailbox
from ddplaunch.records import AgentEnded
from ddplaunch.remains import EndRun, ListRuns, RunsFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddplaunch.config import Remote
    from ddplaunch.hosts import Host
    from ddplaunch.launcher.handles import Handle

Post = Callable[[object], None]

_END_S = 30.0
"""What an agent may take beyond the grace; its own limits add up to less."""

MAX_GRACE_S = 600.0
"""Who wants to end a run by its id does not want to wait for days."""


@dataclass
class _Machine(Asked):
    """One that is asked. ``left``: pids that could not be ended; None as long as nobody knows."""

    found: RunsFound | None = None
    left: tuple[int, ...] | None = None


def ps(hosts: Sequence[Host], remote: Remote, show: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Show what runs of this user there are on this machine and on ``hosts``: by ``show`` the table, ``say`` the rest.

    Raises:
        LaunchError: some hosts could not be asked; the others' answers have been shown.
    """
    with _asked(hosts, remote) as machines:
        found = machines.find()
        if page.ids(found.values()):
            show(page.table(found))
        else:
            say("no run of yours has a process here" if not hosts else "no run of yours has a process on these hosts")
        for line in page.hidden(found):
            say(line)
        machines.check()


def kill(run_id: str, grace_s: float, hosts: Sequence[Host], remote: Remote, say: Callable[[str], None]) -> None:
    """End the runs of this id, and say what was ended. Other arguments are as for ``ps``.

    Raises:
        LaunchError: a host could not be asked, or something is left; all that could be done has been done.
        UsageError: there is no such run.
    """
    if run_id in run_marks.names(os.environ.get(environ.RUN_ID, "")):
        raise UsageError(f"--kill {run_id}: this command is a part of that run", "Ask from another terminal.")
    grace_s = max(0.0, min(grace_s, MAX_GRACE_S))
    with _asked(hosts, remote) as machines:
        found = machines.find()
        concerned = {name: page.of_run(run_id, here) for name, here in found.items()}
        if not any(concerned.values()):
            machines.check()
            raise _unknown(run_id, page.ids(found.values()))
        is_first = {name: any(dict(run.counts).get("launcher") for run in runs) for name, runs in concerned.items()}
        say(f"ending {run_id}, SIGKILL in {grace_s:g} s")
        for turn in (True, False):
            machines.end(EndRun(run_id, grace_s), {name for name in concerned if is_first[name] is turn})
        left = machines.left()
        for line in page.ended(run_id, found, left):
            say(line)
        for line in page.hidden(found):
            say(line)
        if any(left.values()):
            hint = (
                "A process that SIGKILL does not end waits in the kernel, for a disk or a GPU; `ps -o stat,wchan PID`."
            )
            raise LaunchError(f"something is left of {run_id}", hint, LEFT_RUNNING)
        machines.check()


def _unknown(run_id: str, there: Sequence[str]) -> UsageError:
    hint = f"There are: {', '.join(there)}." if there else "There is no run at all. --hosts names other machines."
    return UsageError(f"--kill {run_id}: no run of yours has this id on the machines that were asked", hint)


class _Machines:
    """All machines that are asked; an event comes with the index of its machine."""

    def __init__(self) -> None:
        self._mailbox: Mailbox[tuple[int, object]] = Mailbox()
        self._all: list[_Machine] = []

    def ask(self, name: str, start: Callable[[Post], Handle]) -> None:
        """Start an agent by ``start``, which takes where its events are posted, and have it look."""
        index = len(self._all)
        machine = _Machine(name, start(lambda event: self._mailbox.post((index, event))))
        self._all.append(machine)
        machine.handle.send(ListRuns())

    def find(self) -> dict[str, RunsFound]:
        """What is where; a machine that has two names is in it with the first."""
        self._wait(self._all, lambda machine: machine.found is not None)
        found: dict[str, RunsFound] = {}
        for machine in self._all:
            if machine.found and machine.found.machine not in {here.machine for here in found.values()}:
                found[machine.name] = machine.found
        return found

    def end(self, order: EndRun, names: set[str]) -> None:
        """Have these machines end a run, and wait until they have."""
        told = [machine for machine in self._all if machine.name in names and not machine.failure]
        for machine in told:
            machine.handle.send(order)
            machine.deadline = time.monotonic() + order.grace_s + _END_S
        self._wait(told, lambda machine: machine.left is not None)

    def left(self) -> dict[str, tuple[int, ...]]:
        """Pids that could not be ended, of machines that were told to and have answered."""
        return {machine.name: machine.left for machine in self._all if machine.left is not None and not machine.failure}

    def check(self) -> None:
        """Raises LaunchError for the machines that have not answered."""
        failures = [machine.failure for machine in self._all if machine.failure]
        if failures:
            raise LaunchError(f"not all hosts could be asked\n{failures_table(failures)}", "", NODE_NOT_READY)

    def close(self) -> None:
        """End all agents."""
        asking.close(self._all)

    def _wait(self, machines: Sequence[_Machine], is_done: Callable[[_Machine], bool]) -> None:
        late = lambda: [machine for machine in machines if not (machine.failure or is_done(machine))]  # noqa: E731
        asking.wait(late, self._take_next)

    def _take_next(self, deadline: float) -> bool:
        received = self._mailbox.get(deadline)
        if received:
            _take(self._all[received[0]], received[1])
        return received is not None


def _take(machine: _Machine, event: object) -> None:
    match event:
        case RunsFound():
            machine.found = event
        case AgentEnded(left=left):
            machine.left = left
        case AgentLost() if machine.found and machine.left is not None:
            pass  # As it should be.
        case _:
            machine.hear(event)


@contextlib.contextmanager
def _asked(hosts: Sequence[Host], remote: Remote) -> Iterator[_Machines]:
    """Agents that look, on this machine and on the hosts; they are gone at the end."""
    machines = _Machines()
    with contextlib.ExitStack() as stack:
        connect = _connector(hosts, remote, stack)
        stack.callback(machines.close)
        machines.ask(preparation.own_name(), _start_here)
        for host in hosts:
            machines.ask(host.name, partial(connect, host))
        yield machines


def _start_here(post: Post) -> LocalHandle:
    try:
        return LocalHandle(agent_process.start(os.environ), post, _no_output)
    except (OSError, RuntimeError) as error:
        raise LaunchError(f"an agent cannot be started here: {error}", NO_ROOM_HINT) from None


def _connector(hosts: Sequence[Host], remote: Remote, stack: contextlib.ExitStack) -> Callable[[Host, Post], Handle]:
    """What begins to connect to a host, and to start an agent there."""
    from ddplaunch.launcher import ssh_nodes  # paramiko's users wait for it, nobody else.
    from ddplaunch.launcher.ssh import SshHandle

    connections = ssh_nodes.connections(remote, len(hosts))
    stack.callback(connections.close)
    python, env = remote.python or sys.executable, dict(remote.environ)
    start = RemoteStart(python=python, cwd="/", env=env, setup=remote.setup, needs_torch=False)
    return lambda host, post: SshHandle(host, start, connections, post, _no_output)


def _no_output(_header: object, _data: bytes) -> None:
    """Such an agent has no workers."""
