"""Computes the plan of a run: nodes, ranks, devices, environment and commands, for ``--plan``.

Runs in the launcher, in place of a run, and uses the functions of a real run. Facts that are known only on a node, such
as its number of GPUs, are None, or in angle brackets inside a text. Must not start a process or contact a host.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddplaunch import features
from ddplaunch.features.faults.fault_spec import describe, parse
from ddplaunch.features.forwarding.rules import masked_lines
from ddplaunch.features.plan import environment as plan_environment
from ddplaunch.features.plan.environment import RUN_ID, how_counted, inherited_environ, known_gpus, known_workers
from ddplaunch.features.plan.model import NodePlan, Plan, RankPlan
from ddplaunch.features.plan.page import as_json, page
from ddplaunch.features.plan.warnings import warnings
from ddplaunch.features.remote import remote_start
from ddplaunch.launcher import setup
from ddplaunch.protocol.specs import AgentSpec, choose_start
from ddplaunch.rows import load
from ddplaunch.system.files import run_folder, script_file
from ddplaunch.text import masked
from ddplaunch.transport import transports
from ddplaunch.transport.agent_process import COMMAND

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request
    from ddplaunch.config import LaunchConfig
    from ddplaunch.transport.handle import Transport


def plan(config: LaunchConfig) -> Plan:
    """The plan of a run of ``config`` from this machine."""
    given_config, config = config, features.planned(config)
    hosts = setup.node_names(config)
    specs = [_spec(config, hosts, index) for index in range(len(hosts))]
    positions = config.rendezvous.max_nodes if config.rendezvous else min(config.max_nodes, len(hosts))
    gpus, workers = _counts(config, specs)
    counts = workers * positions if config.each_node_has_launcher else workers[:positions]
    depends_on = _depends_on(config, counts)
    sums = itertools.accumulate((count or 0 for count in counts), initial=0)
    firsts = [None if depends_on else first for first in itertools.islice(sums, positions)]
    nodes = tuple(_node(config, index, spec, workers[index], gpus[index], firsts) for index, spec in enumerate(specs))
    ranks, common = _environs(config, nodes, specs, None if depends_on else tuple(count or 0 for count in counts))
    given = {name: value for name, value in config.remote.environ if name not in common}
    nnodes = _nnodes(config)
    if config.task:  # Until here it is the index among the launchers.
        nodes = tuple(replace(node, node_rank=config.task.node_rank) for node in nodes)
    return Plan(
        dry_run=config.dry_run,
        starts=_starts(config),
        min_nodes=nnodes[0],
        max_nodes=nnodes[1],
        world_size=None if None in counts else sum(count or 0 for count in counts),
        depends_on=depends_on,
        max_restarts=config.max_restarts,
        nodes=nodes,
        command=_worker_command(config, specs[0]),
        how=_how(config, specs[0]),
        environ=common,
        given=tuple(masked_lines(given)),
        ranks=ranks,
        injections=tuple(describe(parse(text)) for text in config.injections),
        warnings=warnings(given_config, nodes, specs),
        copied=tuple(notice.text for notice in config.notices[len(given_config.notices) :]),
        details=tuple(notice.text for notice in config.notices if notice.kind == "detail"),
    )


def _nnodes(config: LaunchConfig) -> tuple[int, int]:
    """The least and the greatest number of nodes. With a launcher for each worker, the settings count workers."""
    if config.task:
        return (len(config.task.tasks_per_node),) * 2
    return config.rendezvous.min_nodes if config.rendezvous else config.min_nodes, config.max_nodes


def _counts(config: LaunchConfig, specs: Sequence[AgentSpec]) -> tuple[list[tuple[str, ...] | None], list[int | None]]:
    """Devices and number of workers of each node; None where unknown."""
    cpus = len(os.sched_getaffinity(0)) if config.is_local else None
    gpus = [known_gpus(spec, config, os.environ) for spec in specs]
    workers = [known_workers(spec, found, cpus) for spec, found in zip(specs, gpus, strict=True)]
    if config.dry_run:  # A simulated node has as many GPUs as its workers need.
        gpus = [
            found or tuple(map(str, range((count or 0) * max(1, spec.workers.gpus_per_proc))))
            for found, spec, count in zip(gpus, specs, workers, strict=True)
        ]
    return gpus, workers


def _environs(
    config: LaunchConfig, nodes: Sequence[NodePlan], specs: Sequence[AgentSpec], sizes: tuple[int, ...] | None
) -> tuple[tuple[RankPlan, ...], dict[str, str]]:
    """The variables that differ between workers, and the common ones.

    ``sizes`` are the numbers of workers of all nodes; None if unknown.
    """
    if sizes is None:
        positions = config.rendezvous.max_nodes if config.rendezvous else config.max_nodes
        return (), plan_environment.known_for_all_ranks(config, specs[0], nodes[0], positions)
    found = list(plan_environment.of_ranks(config, nodes, specs, sizes))
    common = plan_environment.common([env for _, env in found])
    ranks = (RankPlan(rank=int(env["RANK"]), host=host, environ=_without(env, common)) for host, env in found)
    return tuple(ranks), common


def _without(env: Mapping[str, str], common: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in common}


def _depends_on(config: LaunchConfig, counts: Sequence[int | None]) -> str:
    if config.rendezvous and config.rendezvous.node_index is None:
        return "the order in which the nodes arrive"
    return "the number of GPUs of each node" if None in counts else ""


def _spec(config: LaunchConfig, hosts: Sequence[str], index: int) -> AgentSpec:
    """The agent's specification in a real run, with its node folder."""
    folder = _folder(config, hosts[index], len(hosts)) if config.output.keeps_files else None
    return setup.agent_spec(config, config.run_id or RUN_ID, index, hosts[index], node_dir=folder)


def _folder(config: LaunchConfig, host: str, nodes: int) -> str:
    here = config.is_local
    if config.output.log_dir:
        base = Path(config.chdir or "" if not here else "", config.output.log_dir).absolute()
    else:
        # Another node has another home folder; without a home folder logs go to a new temporary folder.
        base = (run_folder.base_at_home(os.environ) if here else None) or Path("<state folder>", "ddplaunch")
    folder = base / (config.run_id or RUN_ID)
    if config.each_node_has_launcher:
        shares_host = config.task and config.task.local_world_size > 1
        return str(folder / (f"{host}.{config.task.rank}" if config.task and shares_host else host))
    return str(folder if here and nodes == 1 else folder / host)


def _node(
    config: LaunchConfig,
    index: int,
    spec: AgentSpec,
    workers: int | None,
    gpus: tuple[str, ...] | None,
    firsts: Sequence[int | None],
) -> NodePlan:
    node_rank = config.rendezvous.node_index if config.rendezvous else index if index < len(firsts) else None
    first = None if node_rank is None else firsts[node_rank]
    node = NodePlan(
        host=spec.host,
        node_rank=node_rank,
        workers=workers,
        ranks=None if first is None or workers is None else (first, first + workers - 1),
        gpus=gpus,
        counted="" if workers is not None else how_counted(spec),
        is_spare=index >= len(firsts),
        directory=config.chdir or script_file.working_folder(),
    )
    if config.hosts:
        start = remote_start.agent_start(config, index, RUN_ID)
        row = transports.row(config.remote.transport)
        transport: type[Transport] = load(row.class_path)
        node = replace(node, python=_python(config, start.python), directory=start.cwd, setup=start.setup, way=row.way)
        return replace(node, reached=_address(config, index), command=transport.command(config, index))
    return (
        node
        if config.dry_run and config.max_nodes > 1
        else replace(node, command=COMMAND, python=_python(config, sys.executable))
    )


def _python(config: LaunchConfig, named: str) -> str:
    """The interpreter, as far as it is known before the start."""
    return named if config.env in (None, "", "pack") else f"<Python of {config.env}>"


def _starts(config: LaunchConfig) -> str:
    if config.task and config.each_node_has_launcher:
        return "this worker of several"
    return "this node of several" if config.each_node_has_launcher else transports.row(config.transport).way


def _address(config: LaunchConfig, index: int) -> str:
    host = config.hosts[index]
    return str(replace(host, user=host.user or config.remote.user, port=host.port or config.remote.port))


def _how(config: LaunchConfig, spec: AgentSpec) -> Literal["forked", "executed"]:
    def is_plain(path: str) -> bool:
        """A script that is not on this machine is taken for a plain one."""
        path = os.path.join(config.chdir or "", path)
        return not os.path.exists(path) or script_file.is_plain(path)

    chosen = choose_start(spec, inherited_environ(config), is_plain)
    return "executed" if chosen.how == "exec" else "forked"


def _worker_command(config: LaunchConfig, spec: AgentSpec) -> tuple[str, ...]:
    program = spec.program
    argument = ("--local-rank=<LOCAL_RANK>",) if spec.workers.pass_local_rank else ()
    script = (program.path, *argument, *masked(program.args))
    if program.entry == "program":
        return script
    named = (config.remote.python if config.hosts else None) or sys.executable
    python = config.python or _python(config, named)
    return (python, "-u", *(("-m",) if program.entry == "module" else ()), *script)


def show(request: Request) -> None:
    """Print the plan: a page, or JSON."""
    planned = plan(features.prepare(request.configure()))
    request.show(as_json(planned) if request.options["json"] else page(planned, is_verbose=request.is_verbose))
