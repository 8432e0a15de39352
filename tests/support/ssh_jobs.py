"""Jobs on the nodes of a lab, started by a launcher on the lab's own machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

from tests.support.nodes import Lab, Node
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, Running, start

ROUNDS = PROGRAMS / "rounds.py"


def job(
    lab: Lab,
    *arguments: str | Path,
    hosts: str = "",
    extra: dict[str, str] | None = None,
    under: Sequence[str] = (),
    **popen: Any,
) -> Running:
    """A run on the hosts, by default all of the lab, started on the lab's machine for launchers, by ``under``."""
    names = hosts or ",".join(node.name for node in lab.nodes)
    env = {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"], **(extra or {})}
    given = ("--hosts", names, "--ssh-config", lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK", "-x", "XDG_STATE_HOME")
    return start(*given, *arguments, under=(*under, *lab.prefix), env=env, **popen)


def rounds(lab: Lab, end: Path, *options: str, hosts: str = "") -> Running:
    """A gloo job with a worker per node that goes on until ``end`` is there."""
    return job(lab, "--nproc-per-node", "1", *options, ROUNDS, end, hosts=hosts)


def wait_for_world(running: Running, number: int, hosts: str) -> None:
    """Round ``number`` runs, on ``hosts`` in the order of ranks."""
    names = hosts.split(",")
    for rank, host in enumerate(names):
        running.wait_for(rf"\[{host}:{rank}\] rank {rank} of {len(names)} in round {number}")


def pid_on(node: Node, sign: str) -> int:
    """The process on ``node`` whose command line has ``sign``; waits for it."""
    return wait_until(lambda: [pid for pid, line in node.pids().items() if sign in line], 30)[0]


def agent(lab: Lab, name: str) -> int:
    """The agent on the node of that name."""
    return pid_on(lab[name], "DDPLAUNCH_START")


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stopped in the meantime."""
    os.kill(pid, SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, SIGCONT)
