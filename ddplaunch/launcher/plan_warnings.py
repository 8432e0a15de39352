"""What is likely not meant, or cannot work, and can be known before a run starts; one sentence each."""

from __future__ import annotations

import os
import re
import socket
from itertools import combinations
from typing import TYPE_CHECKING

from ddplaunch import forwarding
from ddplaunch.launcher.plan_counts import has_driver, is_here
from ddplaunch.printable import shown
from ddplaunch.working_folder import working_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddplaunch.config import LaunchConfig
    from ddplaunch.hosts import Host
    from ddplaunch.launcher.plan import NodePlan
    from ddplaunch.model import AgentSpec

_MAX_PAIRS = 3
_MAX_ALIKE = 20
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1")


def warnings(config: LaunchConfig, nodes: Sequence[NodePlan], specs: Sequence[AgentSpec]) -> tuple[str, ...]:
    """In the order in which they matter: what would keep the run from starting comes first."""
    here = is_here(config)
    return (
        *(_no_start(config, specs, nodes) if here else ()),
        *(text.removeprefix("warning: ") for level, text in config.notices if level == 0),
        *_few_devices(nodes, specs),
        *_same_machine(config.hosts),
        *(_cores(config, nodes) if here else _left_behind(config)),
        *_without_gpus(config),
        *(_not_rehearsed(config) if config.dry_run else _only_rehearsed(config)),
        *_restarts(config),
        *_unseen_ranks(config, nodes),
    )


def _no_start(config: LaunchConfig, specs: Sequence[AgentSpec], nodes: Sequence[NodePlan]) -> Iterator[str]:
    """What an agent on this machine will refuse."""
    folder = config.chdir or working_folder()
    if not os.path.isdir(folder):
        yield f"the run will not start: --chdir {shown(folder)} is not a folder here"
    elif config.entry == "script" and not os.path.exists(os.path.join(folder, config.script)):
        yield f"the run will not start: there is no {shown(config.script)} in {shown(folder)}"
    if config.dry_run and specs[0].gpus is None and specs[0].nproc_per_node in ("auto", "gpu", "xpu"):
        word = specs[0].nproc_per_node
        yield f"the dry run will not start: with --nproc-per-node {word}, --gpus must say which GPUs a node has"
    if config.dry_run and (config.entry == "program" or not specs[0].python_is_ours):
        what = "a program" if config.entry == "program" else f"another Python, {config.python},"
        yield f"the dry run will not start: GPUs cannot be rehearsed in {what}; give a Python script or -m"


def _few_devices(nodes: Sequence[NodePlan], specs: Sequence[AgentSpec]) -> Iterator[str]:
    for node, spec in zip(nodes, specs, strict=True):
        each = 1 if spec.virtual_local_rank else spec.gpus_per_proc
        if node.workers and node.gpus is not None and each and node.workers * each > len(node.gpus):
            if spec.virtual_local_rank and not node.gpus:
                continue  # As torchrun, it then goes by LOCAL_RANK.
            needs = f"{node.workers} workers need {node.workers * each} GPUs"
            yield f"the run will not start: on {node.host} {needs}, and {len(node.gpus)} can be used"
            return
        if spec.gpus and node.workers and node.workers > len(spec.gpus) and not each:
            first = len(spec.gpus)
            yield f"on {node.host} {node.workers} workers see {first} GPUs: local rank {first} has no cuda:{first}"
            return


def _same_machine(hosts: Sequence[Host]) -> Iterator[str]:
    own = socket.gethostname().lower()
    alike: dict[str, list[Host]] = {}
    for host in hosts:
        alike.setdefault(_first_label(host.name.lower(), own), []).append(host)
    pairs = [
        (a, b) for group in alike.values() for a, b in combinations(group[:_MAX_ALIKE], 2) if _may_be_one(a, b, own)
    ]
    for a, b in pairs[:_MAX_PAIRS]:
        yield f"{a} and {b} may be one machine: its GPUs would then be used twice"
    if len(pairs) > _MAX_PAIRS:
        yield "more of the hosts may be one machine"


def _first_label(name: str, own: str) -> str:
    label = name if re.fullmatch(r"[0-9.]+|.*:.*", name) else name.partition(".")[0]
    return "" if _LOOPBACK.fullmatch(name) or label == own.partition(".")[0] else label


def _may_be_one(a: Host, b: Host, own: str) -> bool:
    """As far as names tell; asking for addresses would be a message to a server."""
    one, other = a.name.lower(), b.name.lower()
    are_own = all(_LOOPBACK.fullmatch(name) or _names_one(name, own) for name in (one, other))
    return are_own or _names_one(one, other)


def _names_one(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _cores(config: LaunchConfig, nodes: Sequence[NodePlan]) -> Iterator[str]:
    cpus = len(os.sched_getaffinity(0))
    count = sum(node.workers or 0 for node in nodes if not node.is_spare)
    if count > cpus:
        cores = "1 CPU" if cpus == 1 else f"{cpus} CPUs"
        slow = "the rehearsal says nothing of the job's speed" if config.dry_run else "they wait for each other"
        yield f"{count} workers on the {cores} that may be used here: {slow}"


def _left_behind(config: LaunchConfig) -> Iterator[str]:
    """What this shell says of devices and networks stays here."""
    given = dict(config.remote.environ)
    names = [name for name in os.environ if name.endswith(("_VISIBLE_DEVICES", "_SOCKET_IFNAME"))]
    stays = sorted(name for name in names if name not in given and forwarding.rule_of(name).when == "named")
    if stays:
        yield f"set here and not passed on to the hosts: {', '.join(stays)}; -x NAME passes it on"


def _without_gpus(config: LaunchConfig) -> Iterator[str]:
    if config.dry_run or config.hosts or has_driver():
        return
    given = {
        "--gpus": config.gpus,
        "--gpus-per-proc": config.gpus_per_proc,
        "--virtual-local-rank": config.virtual_local_rank,
        "--numa-binding": config.numa_binding,
        f"--nproc-per-node {config.nproc_per_node}": config.nproc_per_node == "gpu",
    }
    names = [name for name, value in given.items() if value]
    if names:
        yield f"{' and '.join(names)} matter{'' if len(names) > 1 else 's'} only with GPUs, and none was found here"


def _not_rehearsed(config: LaunchConfig) -> Iterator[str]:
    given = {
        "--numa-binding": config.numa_binding,
        "--interface": config.interface,
        "--remote-python": config.remote.python,
        "--remote-setup": config.remote.setup,
    }
    names = [name for name, value in given.items() if value]
    if names:
        yield f"without effect in a dry run: {', '.join(names)}"


def _only_rehearsed(config: LaunchConfig) -> Iterator[str]:
    if config.rehearse_compile:
        yield "--rehearse-compile has no effect without --dry-run"


def _restarts(config: LaunchConfig) -> Iterator[str]:
    least = config.meeting.min_nodes if config.meeting else config.min_nodes
    is_elastic = least < config.max_nodes
    if not config.max_restarts and (is_elastic or len(config.hosts) > config.max_nodes):
        why = f"--nnodes {least}:{config.max_nodes}" if is_elastic else "spare hosts"
        yield f"{why} with --max-restarts 0: a node may be lost, but the failure of any worker ends the job"


def _unseen_ranks(config: LaunchConfig, nodes: Sequence[NodePlan]) -> Iterator[str]:
    ends = [node.ranks[1] if node.ranks else None for node in nodes if not node.is_spare]
    last = None if config.meeting or None in ends else max((end for end in ends if end is not None), default=None)
    unseen = sorted(rank for rank in config.show_ranks or () if last is not None and rank > last)
    if unseen:
        yield f"--ranks-filter {unseen[0]}: the ranks are 0 to {last}"
