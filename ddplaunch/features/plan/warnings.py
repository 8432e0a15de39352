"""Warnings of a plan: probable mistakes, and settings that cannot work; one sentence each.

Runs in the launcher. Reads this machine's files and environment; must not contact a host.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from ddplaunch.features.forwarding.rules import rule_of
from ddplaunch.system import devices
from ddplaunch.system.files.script_file import working_folder
from ddplaunch.text import grouped, plural, quote

if TYPE_CHECKING:
    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.plan.model import NodePlan
    from ddplaunch.protocol.specs import AgentSpec

_MAX_PAIRS = 3
_MAX_COMPARED = 20
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1")


def warnings(config: LaunchConfig, nodes: Sequence[NodePlan], specs: Sequence[AgentSpec]) -> tuple[str, ...]:
    """All warnings, the most important first: settings that prevent the start of the run."""
    here = config.is_local
    return (
        *(_cannot_start(config, specs, nodes) if here else ()),
        *(notice.text for notice in config.notices if notice.kind == "warning"),
        *_few_devices(nodes, specs),
        *_same_machine(config.hosts),
        *(_few_cpus(config, nodes) if here else _not_forwarded(config)),
        *_without_gpus(config),
        *(notice.text for notice in config.notices if notice.kind == "unused"),
        *_restarts(config),
        *_unseen_ranks(config, nodes),
    )


def _cannot_start(config: LaunchConfig, specs: Sequence[AgentSpec], nodes: Sequence[NodePlan]) -> Iterator[str]:
    """Settings that an agent on this machine rejects."""
    folder = config.chdir or working_folder()
    if not os.path.isdir(folder):
        yield f"the run will not start: --chdir {quote(folder)} is not a folder here"
    elif config.entry == "script" and config.script != "-" and not os.path.exists(os.path.join(folder, config.script)):
        yield f"the run will not start: there is no {quote(config.script)} in {quote(folder)}"
    if config.dry_run and specs[0].workers.gpus is None and specs[0].workers.nproc_per_node in ("auto", "gpu", "xpu"):
        word = specs[0].workers.nproc_per_node
        yield f"the dry run will not start: with --nproc-per-node {word}, --gpus must name the GPUs of a node"
    if config.dry_run and (config.entry == "program" or not specs[0].same_python):
        program = "a program" if config.entry == "program" else f"another Python, {config.python},"
        yield f"the dry run will not start: GPUs cannot be simulated in {program}; give a Python script or -m"


def _few_devices(nodes: Sequence[NodePlan], specs: Sequence[AgentSpec]) -> Iterator[str]:
    for node, spec in zip(nodes, specs, strict=True):
        per_worker = 1 if spec.workers.virtual_local_rank else spec.workers.gpus_per_proc
        if node.workers and node.gpus is not None and per_worker and node.workers * per_worker > len(node.gpus):
            if spec.workers.virtual_local_rank and not node.gpus:
                continue  # Each worker then gets the id LOCAL_RANK, as in torchrun.
            needed = plural(node.workers * per_worker, "GPU")
            needs = f"{plural(node.workers, 'worker')} need{'s' * (node.workers == 1)} {needed}"
            yield f"the run will not start: on {node.host} {needs}, and {len(node.gpus)} can be used"
            return
        if spec.workers.gpus and node.gpus and node.workers and node.workers > len(node.gpus) and not per_worker:
            first = len(node.gpus)
            few = f"{node.workers} workers see {plural(first, 'GPU')}"
            yield f"on {node.host} {few}: local rank {first} has no cuda:{first}"
            return


def _same_machine(hosts: Sequence[Host]) -> Iterator[str]:
    own = socket.gethostname().lower()
    by_label = grouped((_first_label(host.name.lower(), own), host) for host in hosts)
    pairs = [
        (a, b)
        for group in by_label.values()
        for a, b in combinations(group[:_MAX_COMPARED], 2)
        if _may_be_one(a, b, own)
    ]
    for a, b in pairs[:_MAX_PAIRS]:
        yield f"{a} and {b} may be one machine: its GPUs would then be used twice"
    if len(pairs) > _MAX_PAIRS:
        yield "more of the hosts may be one machine"


def _first_label(name: str, own: str) -> str:
    label = name if re.fullmatch(r"[0-9.]+|.*:.*", name) else name.partition(".")[0]
    return "" if _LOOPBACK.fullmatch(name) or label == own.partition(".")[0] else label


def _may_be_one(a: Host, b: Host, own: str) -> bool:
    """Whether two names may mean one machine. Compares texts only: a look-up of addresses would contact a server."""
    one, other = a.name.lower(), b.name.lower()
    are_own = all(_LOOPBACK.fullmatch(name) or _names_one(name, own) for name in (one, other))
    return are_own or _names_one(one, other)


def _names_one(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _few_cpus(config: LaunchConfig, nodes: Sequence[NodePlan]) -> Iterator[str]:
    cpus = len(os.sched_getaffinity(0))
    count = sum(node.workers or 0 for node in nodes if not node.is_spare)
    if count > cpus:
        cores = plural(cpus, "CPU")
        slow = "the dry run does not show the job's speed" if config.dry_run else "they compete for them"
        yield f"{count} workers on the {cores} that may be used here: {slow}"


def _not_forwarded(config: LaunchConfig) -> Iterator[str]:
    """Variables of devices and networks that are set here and not forwarded to the hosts."""
    given = dict(config.remote.environ)
    names = [name for name in os.environ if name.endswith(("_VISIBLE_DEVICES", "_SOCKET_IFNAME"))]
    stays = sorted(name for name in names if name not in given and rule_of(name).when == "named")
    if stays:
        yield f"set here and not forwarded to the hosts: {', '.join(stays)}; -x NAME forwards it"


def _without_gpus(config: LaunchConfig) -> Iterator[str]:
    if config.dry_run or config.hosts or devices.has_driver():
        return
    if config.workers.gpus and not any(name.endswith("_VISIBLE_DEVICES") for name in os.environ):
        yield f"the run will not start: {devices.NO_GPU}"
    given = {
        "--gpus-per-proc": config.workers.gpus_per_proc,
        "--virtual-local-rank": config.workers.virtual_local_rank,
        "--numa-binding": config.workers.numa_binding not in ("auto", "off"),
        f"--nproc-per-node {config.workers.nproc_per_node}": config.workers.nproc_per_node == "gpu",
    }
    names = [name for name, value in given.items() if value]
    if names:
        yield f"{' and '.join(names)} matter{'' if len(names) > 1 else 's'} only with GPUs, and none was found here"


def _restarts(config: LaunchConfig) -> Iterator[str]:
    least = config.rendezvous.min_nodes if config.rendezvous else config.min_nodes
    is_elastic = least < config.max_nodes
    if not config.max_restarts and (is_elastic or len(config.hosts) > config.max_nodes):
        why = f"--nnodes {least}:{config.max_nodes}" if is_elastic else "spare hosts"
        yield f"{why} with --max-restarts 0: a node may be lost, but the failure of any worker ends the job"


def _unseen_ranks(config: LaunchConfig, nodes: Sequence[NodePlan]) -> Iterator[str]:
    ends = [node.ranks[1] if node.ranks else None for node in nodes if not node.is_spare]
    last = (
        None
        if config.each_node_has_launcher or None in ends
        else max((end for end in ends if end is not None), default=None)
    )
    given = {"--ranks-filter": config.output.show_ranks, "--debug-ranks": config.workers.debug_ranks}
    for option, ranks in given.items():
        unseen = sorted(rank for rank in ranks or () if last is not None and rank > last)
        if unseen:
            yield f"{option} {unseen[0]}: the ranks are 0 to {last}"
