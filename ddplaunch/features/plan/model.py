"""The values that describe a plan: the whole run, each node, each rank.

Made by ``plan`` in the launcher, shown by ``plan_page``. Data only. The field names are those of ``--plan --json``.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node of the run.

    Attributes:
        host: name of the node's host.
        node_rank: None for a spare, and where nodes get their numbers in the order of arrival.
        workers: number of workers; None if only the node can count them.
        ranks: the first and the last rank; None if unknown.
        gpus: ids of the devices that workers may use, fake ones in a dry run; None if only the node can list them.
        counted: rule by which the node counts its workers, if ``workers`` is None; else empty.
        is_spare: replaces a lost node.
        reached: the host in the real run, with user and port if they are given; empty where the launcher starts the
            agent itself.
        way: how the agent starts there in the real run: ``way`` of the transport.
        command: starts the agent in the real run; over SSH the text for the login shell. Empty in a dry run without
            hosts.
        python: interpreter of the agent.
        directory: working directory of the workers.
        setup: shell text that runs before the agent.
    """

    host: str
    node_rank: int | None
    workers: int | None
    ranks: tuple[int, int] | None
    gpus: tuple[str, ...] | None
    counted: str = ""
    is_spare: bool = False
    reached: str = ""
    way: str = ""
    command: tuple[str, ...] = ()
    python: str = ""
    directory: str = ""
    setup: str = ""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One worker, with the variables that differ between workers."""

    rank: int
    host: str
    environ: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that has not started.

    Attributes:
        starts: how the agents start: ``way`` of the transport, "this node of several" or "this worker of several".
        min_nodes, max_nodes: nodes in the sense of the glossary, also where each worker has a launcher.
        depends_on: the unknown fact that determines the ranks; empty if the ranks are known.
        command: command line of a worker.
        how: a worker is ``executed``, or ``forked`` from a process that has imported torch.
        environ: variables with the same value in all workers.
        given: variables of the user or of this machine that workers get, as ``NAME=VALUE``, with secrets masked.
        ranks: the workers of ``nodes``; empty if the ranks depend on something.
        injections: descriptions of the faults that the dry run injects.
        copied: what is copied before the run, and where to.
        details: what a run says only with ``-v``: the scheduler that was found.
    """

    dry_run: bool
    starts: str
    min_nodes: int
    max_nodes: int
    world_size: int | None
    depends_on: str
    max_restarts: int
    nodes: tuple[NodePlan, ...]
    command: tuple[str, ...]
    how: Literal["forked", "executed"]
    environ: dict[str, str] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    ranks: tuple[RankPlan, ...] = ()
    injections: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
