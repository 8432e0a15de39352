"""What a run would do, told before anything starts: nodes, ranks, devices, environment, commands.

Starts nothing and contacts no host. What only a node knows, as how many GPUs it has, is None here, and stands in angle
brackets where it is part of a text. Everything else comes from the functions that the run itself uses.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddplaunch import forwarding, run_folder
from ddplaunch.config import NO_LOGS, LaunchConfig
from ddplaunch.injection import describe
from ddplaunch.launcher import plan_environ, preparation, remote, srun
from ddplaunch.launcher.agent_process import COMMAND
from ddplaunch.launcher.plan_counts import how_counted, is_here, known_gpus, known_workers
from ddplaunch.launcher.plan_environ import RUN_ID
from ddplaunch.launcher.plan_warnings import warnings
from ddplaunch.working_folder import working_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddplaunch.model import AgentSpec


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node of the run.

    Attributes:
        node_rank: None for a spare, and where nodes get their numbers as they arrive.
        workers: None where only the node knows; likewise ``ranks``, the first and the last.
        counted: what the node makes their number from, then; else empty.
        gpus: devices its workers may use, pretended ones in a dry run; None where only the node knows.
        is_spare: takes a lost node's place.
        reached: user, name and port that the real run connects to over SSH; empty where it starts the agent itself.
        command: starts the node's agent in the real run; over SSH, what the login shell is given. Empty where nothing
            says yet how the node is reached.
        python: interpreter of the agent.
        directory: where the workers run.
        setup: what a shell runs there first.
    """

    host: str
    node_rank: int | None
    workers: int | None
    ranks: tuple[int, int] | None
    gpus: tuple[str, ...] | None
    counted: str = ""
    is_spare: bool = False
    reached: str = ""
    command: tuple[str, ...] = ()
    python: str = ""
    directory: str = ""
    setup: str = ""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One worker: what it has that others have not."""

    rank: int
    host: str
    environ: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would do.

    Attributes:
        depends_on: what decides the ranks when the run has started; empty if they are known.
        command: what a worker runs, as if it was typed; it is ``executed``, or ``forked`` from a process that has
            imported torch.
        environ: what all workers get; ``given``: what they are given by the user or from here, values of secrets
            masked, as ``NAME=VALUE``.
        ranks: those of ``nodes``; empty where they depend on something.
        injections: failures that the dry run makes happen.
    """

    dry_run: bool
    starts: Literal["here", "over SSH", "through srun", "this node of several"]
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


def banner(config: LaunchConfig) -> str:
    """What a dry run is, in one line for its start."""
    count = len(preparation.hosts(config)[: config.max_nodes])
    nodes = "1 pretended node" if count == 1 else f"{count} pretended nodes"
    return f"dry run: {nodes} on this machine's CPU, gloo in place of NCCL, no GPU is used; results are a CPU's"


def plan(config: LaunchConfig) -> Plan:
    """All that can be known of a run of ``config``; for its user and this machine."""
    hosts = preparation.hosts(config)
    specs = [_spec(config, hosts, index) for index in range(len(hosts))]
    seats = config.meeting.max_nodes if config.meeting else min(config.max_nodes, len(hosts))
    gpus, workers = _counts(config, specs)
    counts = workers * seats if config.meeting else workers[:seats]
    depends_on = _what_decides(config, counts)
    firsts = [None if depends_on else sum(count or 0 for count in counts[:seat]) for seat in range(seats)]
    nodes = tuple(_node(config, index, spec, workers[index], gpus[index], firsts) for index, spec in enumerate(specs))
    ranks, common = _environs(config, nodes, specs, None if depends_on else tuple(count or 0 for count in counts))
    given = {name: value for name, value in config.remote.environ if name not in common}
    return Plan(
        dry_run=config.dry_run,
        starts=_starts(config),
        min_nodes=config.meeting.min_nodes if config.meeting else config.min_nodes,
        max_nodes=config.max_nodes,
        world_size=None if None in counts else sum(count or 0 for count in counts),
        depends_on=depends_on,
        max_restarts=config.max_restarts,
        nodes=nodes,
        command=_worker_command(config, specs[0]),
        how=_how(specs[0]),
        environ=common,
        given=tuple(forwarding.shown(given)),
        ranks=ranks,
        injections=tuple(map(describe, config.injections)),
        warnings=warnings(config, nodes, specs),
    )


def _counts(config: LaunchConfig, specs: Sequence[AgentSpec]) -> tuple[list[tuple[str, ...] | None], list[int | None]]:
    """GPUs and workers of each node."""
    cpus = len(os.sched_getaffinity(0)) if is_here(config) else None
    gpus = [known_gpus(spec, config, os.environ) for spec in specs]
    workers = [known_workers(spec, found, cpus) for spec, found in zip(specs, gpus, strict=True)]
    if config.dry_run:  # A node has as many as its workers need.
        gpus = [
            found or tuple(map(str, range((count or 0) * max(1, spec.gpus_per_proc))))
            for found, spec, count in zip(gpus, specs, workers, strict=True)
        ]
    return gpus, workers


def _environs(
    config: LaunchConfig, nodes: Sequence[NodePlan], specs: Sequence[AgentSpec], sizes: tuple[int, ...] | None
) -> tuple[tuple[RankPlan, ...], dict[str, str]]:
    """What each worker has for itself, and what all have; ``sizes`` are all nodes' workers, None if they are open."""
    if sizes is None:
        seats = config.meeting.max_nodes if config.meeting else config.max_nodes
        return (), plan_environ.sure(config, specs[0], nodes[0], seats)
    found = list(plan_environ.of_ranks(config, nodes, specs, sizes))
    common = plan_environ.common([env for _, env in found])
    ranks = (RankPlan(rank=int(env["RANK"]), host=host, environ=_without(env, common)) for host, env in found)
    return tuple(ranks), common


def _without(env: Mapping[str, str], common: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in common}


def _what_decides(config: LaunchConfig, counts: Sequence[int | None]) -> str:
    if config.meeting and config.meeting.node_rank is None:
        return "the order in which the nodes arrive"
    return "how many GPUs each node finds" if None in counts else ""


def _spec(config: LaunchConfig, hosts: Sequence[str], index: int) -> AgentSpec:
    """What the agent will be told; the folder is the one it will use."""
    folder = None if config.log_dir == NO_LOGS else _folder(config, hosts[index], len(hosts))
    spec = preparation.agent_spec(config, config.run_id or RUN_ID, hosts[index], folder, {})
    return preparation.of_host(spec, config.hosts[index]) if config.hosts else spec


def _folder(config: LaunchConfig, host: str, nodes: int) -> str:
    here = is_here(config)
    if config.log_dir:
        base = Path(config.chdir or "" if not here else "", config.log_dir).absolute()
    else:
        # Another node has another home; without one there is a fresh folder for temporary files.
        has_home = os.path.isabs(os.environ.get("XDG_STATE_HOME", "")) or os.path.expanduser("~") != "~"
        base = run_folder.default_base(os.environ) if here and has_home else Path("<state folder>", "ddplaunch")
    folder = base / (config.run_id or RUN_ID)
    return str(folder if here and nodes == 1 else folder / host)


def _node(
    config: LaunchConfig,
    index: int,
    spec: AgentSpec,
    workers: int | None,
    gpus: tuple[str, ...] | None,
    firsts: Sequence[int | None],
) -> NodePlan:
    node_rank = config.meeting.node_rank if config.meeting else index if index < len(firsts) else None
    first = None if node_rank is None else firsts[node_rank]
    node = NodePlan(
        host=spec.host,
        node_rank=node_rank,
        workers=workers,
        ranks=None if first is None or workers is None else (first, first + workers - 1),
        gpus=gpus,
        counted="" if workers is not None else how_counted(spec),
        is_spare=index >= len(firsts),
        directory=config.chdir or working_folder(),
    )
    if config.hosts:
        start = preparation.remote_start(config, RUN_ID)
        reached = _reached(config, index)
        node = replace(node, python=start.python, directory=start.cwd, setup=start.setup)
        command = srun.command(spec.host) if config.remote.by_srun else (remote.COMMAND,)
        return replace(node, reached=reached, command=command)
    return node if config.dry_run and config.max_nodes > 1 else replace(node, command=COMMAND, python=sys.executable)


def _starts(config: LaunchConfig) -> Literal["here", "over SSH", "through srun", "this node of several"]:
    if config.meeting:
        return "this node of several"
    return "here" if is_here(config) else "through srun" if config.remote.by_srun else "over SSH"


def _reached(config: LaunchConfig, index: int) -> str:
    host = config.hosts[index]
    return str(replace(host, user=host.user or config.remote.user, port=host.port or config.remote.port))


def _how(spec: AgentSpec) -> Literal["forked", "executed"]:
    executes = spec.program.entry == "program" or spec.start_method == "spawn" or not spec.python_is_ours
    return "executed" if executes else "forked"


def _worker_command(config: LaunchConfig, spec: AgentSpec) -> tuple[str, ...]:
    program = spec.program
    argument = ("--local-rank=<LOCAL_RANK>",) if spec.pass_local_rank else ()
    script = (program.path, *argument, *program.args)
    if program.entry == "program":
        return script
    python = config.python or (config.remote.python if config.hosts else None) or sys.executable
    return (python, "-u", *(("-m",) if program.entry == "module" else ()), *script)
