"""What a scheduler tells a ddplaunch that it started: the values that ``cluster.detect`` gives, and what follows."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from typing import Literal

from ddplaunch.hostfile import read_hostfile
from ddplaunch.hosts import Host
from ddplaunch.task import Task

Kind = Literal["node", "task", "allocation", "hosts"]

PORTS = (16384, 28671)
"""Below what Linux and Kubernetes hand out (32768, 30000) and torchrun's 29400 and 29500, above most services."""


@dataclass(frozen=True, kw_only=True)
class Detected:
    """What started ddplaunch, and what it tells.

    Attributes:
        name: the scheduler's name, for messages.
        kind: ``node``: started once on every node. ``task``: once for every worker, this one is ``task``.
            ``allocation``: once, by SLURM, with ``hosts`` that srun can reach. ``hosts``: once, with hosts for ssh.
        description: one line for ``-v``.
        index: this agent's number among the ``agents`` that meet, which are nodes, or workers for a ``task``. Either
            is None where nobody tells; then only ``--nnodes`` and ``--node-rank`` can.
        hosts: the nodes, in the scheduler's order, without slots: it counts CPUs, not workers.
        hostfile: the file that names them, where the environment does not; ``read_hosts`` reads it.
        first_host: the node that serves the rendezvous; None where nobody tells, see ``needs_endpoint``.
        ports: candidates for the rendezvous, the same on all nodes, in the order to try; see ``candidate_ports``.
        token: what all of this run have in common and no other run has; fit for a run id. None where there is none.
        serves: this agent serves the rendezvous.
        warnings: sentences of what is likely not meant; ``lint`` has them too.
    """

    name: str
    kind: Kind
    description: str
    index: int | None = None
    agents: int | None = None
    hosts: tuple[Host, ...] = ()
    hostfile: str | None = None
    first_host: str | None = None
    ports: tuple[int, ...] = ()
    token: str | None = None
    serves: bool = False
    task: Task | None = None
    warnings: tuple[str, ...] = ()


def candidate_ports(token: str, first: int = PORTS[0], last: int = PORTS[1], count: int = 8) -> tuple[int, ...]:
    """Ports at which the nodes of a run may meet: everyone who knows the token gets the same ones, in one order.

    A formula cannot know which ports are free, so none of them is *the* port. The node that serves binds the first that
    is free, and keeps it. The others look at all of them until a store shows the run's token; a store without it
    belongs to another run, or is about to get it, and is looked at again.
    """
    ports: dict[int, None] = {}
    for turn in itertools.count():
        if len(ports) >= min(count, last - first + 1):
            break
        digest = hashlib.sha256(f"{token} {turn}".encode()).digest()
        ports[first + int.from_bytes(digest[:8], "big") % (last - first + 1)] = None
    return tuple(ports)


def read_hosts(detected: Detected) -> tuple[Host, ...]:
    """All hosts, also where a file names them; without the slots, which are CPUs there.

    Raises:
        UsageError: the file cannot be read.
    """
    if detected.hostfile is None:
        return detected.hosts
    return tuple(replace(host, slots=None) for host in read_hostfile(detected.hostfile))
