"""Workers, devices and environment of a plan's nodes, as far as they are known on this machine.

Runs in the launcher. Uses the functions of a real run; unknown values stand in angle brackets. Reads /proc and the
environment, contacts no host.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.launcher import setup
from ddplaunch.protocol import environment, script_request
from ddplaunch.protocol.results import Round
from ddplaunch.system import devices
from ddplaunch.text import free_gpus
from ddplaunch.transport.handle import node_tag

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.plan.model import NodePlan
    from ddplaunch.protocol.specs import AgentSpec

RUN_ID = "<run id>"
"""Stands for the run id and for the run tag: they are equal where the user gives no run id."""


def of_ranks(
    config: LaunchConfig, nodes: Sequence[NodePlan], specs: Sequence[AgentSpec], sizes: tuple[int, ...]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Host and environment of every worker, by rank, on the nodes whose number of workers is known.

    ``sizes`` are the numbers of workers of all nodes.
    """
    names = setup.node_names(config)
    firsts = list(itertools.accumulate(sizes, initial=0))
    for index, (node, spec) in enumerate(zip(nodes, specs, strict=True)):
        if node.node_rank is not None:
            shared = _shared(config, names, index, sizes[node.node_rank])
            round_ = _round(config, specs[0], node.node_rank, sizes, firsts)
            for local_rank in range(round_.local_world_size):
                yield node.host, _environ(config, spec, node, shared, round_, local_rank)


def common(environs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The variables that have one value in all ``environs``."""
    return {name: value for name, value in environs[0].items() if all(env.get(name) == value for env in environs)}


def known_for_all_ranks(config: LaunchConfig, spec: AgentSpec, node: NodePlan, nodes: int) -> dict[str, str]:
    """The variables of every worker that do not depend on unknown facts: those that are equal in different cases."""
    workers = node.workers or 1
    names = setup.node_names(config)
    round_ = _round(config, spec, 0, (workers,) * nodes, (0, nodes * workers))
    cases = [(round_, 0, workers), (replace(round_, node_rank=1, first_rank=workers), 1, workers)]
    if node.workers is None or config.min_nodes < config.max_nodes:
        more = replace(round_, nnodes=nodes + 1, local_world_size=workers + 1, world_size=(nodes + 1) * (workers + 1))
        cases.append((more, 0, workers + 1))
    return common(
        [
            _environ(config, spec, node, _shared(config, names, case.node_rank, count), case, local_rank)
            for case, local_rank, count in cases
        ]
    )


def _shared(config: LaunchConfig, names: tuple[str, ...], index: int, workers: int) -> dict[str, str]:
    """The variables of ``environment.NAMES`` with one value for all workers of a node."""
    here, inherited = config.is_local, inherited_environ(config)
    inherited_ours = {name: value for name, value in inherited.items() if name in environment.NAMES}
    tag = node_tag(f"{config.run_id}.<number>" if config.run_id else RUN_ID, names, index)
    shared = environment.shared_environ(inherited_ours, tag, workers, len(os.sched_getaffinity(0)))
    if not here and workers > 1 and "OMP_NUM_THREADS" not in inherited_ours:
        shared["OMP_NUM_THREADS"] = f"<CPUs of the node / {workers}>"
    added = _interfaces(config)
    for found in features.call_each("default_environ", config, inherited, workers):
        added |= found
    return {**shared, **{name: value for name, value in added.items() if name not in inherited}}


def _interfaces(config: LaunchConfig) -> dict[str, str]:
    """The variables that ``MultiNodeRendezvous.default_environ`` sets on a node."""
    if config.dry_run or not config.has_peers:
        return {}
    name = "<the interface between the nodes>" if config.local_addr or not config.interface else config.interface
    is_selected = config.interface or config.local_addr
    return {"GLOO_SOCKET_IFNAME": name, **({"NCCL_SOCKET_IFNAME": f"={name}"} if is_selected else {})}


def _round(
    config: LaunchConfig, spec: AgentSpec, node_rank: int, sizes: tuple[int, ...], firsts: Sequence[int]
) -> Round:
    """``firsts`` are the first ranks of the nodes, and last the number of all ranks."""
    several = config.each_node_has_launcher or config.max_nodes > 1
    return Round(
        attempt=0,
        restart_count=0,
        node_rank=node_rank,
        nnodes=len(sizes),
        first_rank=firsts[node_rank],
        local_world_size=sizes[node_rank],
        world_size=firsts[-1],
        master_addr=_master_addr(config, spec),
        master_port=0 if several else spec.master_port or 0,
        has_store=bool(several) or sizes[0] > 1,
    )


def _master_addr(config: LaunchConfig, spec: AgentSpec) -> str:
    if config.dry_run and config.one_launcher_leads:
        return "127.0.0.1"
    if config.has_peers:
        return "<address of the first node>"
    return spec.master_addr or "127.0.0.1"


def _environ(
    config: LaunchConfig, spec: AgentSpec, node: NodePlan, shared: Mapping[str, str], round_: Round, local_rank: int
) -> dict[str, str]:
    """The variables that ddplaunch sets for this worker."""
    folder = f"{spec.node_dir}/attempt_0/{local_rank}" if spec.node_dir else ""
    error_file = f"{folder}/error.json" if folder else ""
    request_file = f"{folder}/{script_request.FILE}" if folder else "<a file in memory>"
    env = environment.worker_environ(shared, spec, round_, local_rank, error_file, request_file)
    env[environment.RUN_ID] = env.pop(environment.RUN_ID)  # Shown last.
    if not round_.master_port:
        env["MASTER_PORT"] = "<a free port>"
    devices = gpus_of_worker(spec, node.gpus, local_rank)
    return env if devices is None else {**env, "CUDA_VISIBLE_DEVICES": devices}


def inherited_environ(config: LaunchConfig) -> Mapping[str, str]:
    """The environment of an agent, as far as it is known here."""
    return {**(os.environ if config.is_local else {}), **dict(config.remote.environ)}


def known_gpus(spec: AgentSpec, config: LaunchConfig, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The devices that the node's workers may use; None if only the node can list them."""
    if spec.workers.gpus is not None:
        count = free_gpus(spec.workers.gpus)
        return spec.workers.gpus if count is None else tuple(f"<free GPU {i + 1}>" for i in range(count)) or None
    if config.dry_run:
        return ()
    hides = any(name.endswith("_VISIBLE_DEVICES") for name in environ)
    return () if not config.hosts and not hides and not devices.has_driver() else None


def known_workers(spec: AgentSpec, gpus: tuple[str, ...] | None, cpus: int | None) -> int | None:
    """The node's number of workers, by the agent's rules; None if only the node can count them.

    ``cpus`` is the number of CPUs of the node; None if unknown.
    """
    nproc = spec.workers.nproc_per_node
    if isinstance(nproc, int):
        return nproc
    if nproc == "cpu":
        return cpus
    if nproc == "xpu" or gpus is None:
        return None
    by_gpu = max(1, len(gpus) // max(1, spec.workers.gpus_per_proc)) if gpus else None
    return by_gpu or {None: 1, "auto": cpus}.get(nproc)


def how_counted(spec: AgentSpec) -> str:
    """The rule by which the node counts its workers, for the user; used where ``known_workers`` is None."""
    if spec.workers.nproc_per_node == "cpu":
        return "one per CPU"
    if spec.workers.nproc_per_node == "xpu":
        return "one per XPU"
    return "one per GPU" if spec.workers.gpus_per_proc < 2 else f"one per {spec.workers.gpus_per_proc} GPUs"


def _ordinals(first: int, last: int) -> str:
    return f"no. {first}" if first == last else f"no. {first} to {last}"


def gpus_of_worker(spec: AgentSpec, gpus: tuple[str, ...] | None, local_rank: int) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES for a worker; None where it is not changed."""
    count = 1 if spec.workers.virtual_local_rank else spec.workers.gpus_per_proc
    if not count:
        return ",".join(gpus or ("<all free GPUs>",)) if spec.workers.gpus else None
    if gpus is None:
        last = local_rank * count + count - 1
        return f"<{_ordinals(local_rank * count, last)} of the node's GPUs>"
    if not gpus and not spec.workers.virtual_local_rank:
        return None
    named = gpus or tuple(map(str, range(local_rank + 1)))  # Without GPUs it is LOCAL_RANK, as in torchrun.
    return ",".join(named[local_rank * count : (local_rank + 1) * count])
