"""The environment that workers would get, from the functions by which they get it; what is not known stands in <>."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch import environ
from ddplaunch.launcher import preparation
from ddplaunch.launcher.handles import mark_of
from ddplaunch.launcher.plan_counts import gpus_of_worker, is_here
from ddplaunch.model import Round

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.plan import NodePlan
    from ddplaunch.model import AgentSpec

RUN_ID = "<run id>"

_BY_RANK = (
    *("RANK", "ROLE_RANK", "GROUP_RANK", "LOCAL_RANK"),
    *("TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES", environ.RUN_ID),
)
_BY_COUNT = ("WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS")


def of_ranks(
    config: LaunchConfig, nodes: Sequence[NodePlan], specs: Sequence[AgentSpec], sizes: tuple[int, ...]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Host and environment of every worker whose node's number is known, by rank; ``sizes`` are all nodes'."""
    for index, (node, spec) in enumerate(zip(nodes, specs, strict=True)):
        if node.node_rank is not None:
            shared = _shared(config, spec, index, sizes[node.node_rank])
            round_ = _round(config, specs[0], node.node_rank, sizes)
            for local_rank in range(round_.local_world_size):
                yield node.host, _environ(config, spec, node, shared, round_, local_rank)


def common(environs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What is the same in all."""
    return {name: value for name, value in environs[0].items() if all(env.get(name) == value for env in environs)}


def sure(config: LaunchConfig, spec: AgentSpec, node: NodePlan, nodes: int) -> dict[str, str]:
    """What every worker gets, as far as it does not follow from what is open."""
    workers = node.workers or 1
    round_ = _round(config, spec, 0, (workers,) * nodes)
    env = _environ(config, spec, node, _shared(config, spec, 0, workers), round_, 0)
    unsure = {*_BY_RANK, *(_BY_COUNT if node.workers is None or config.min_nodes < config.max_nodes else ())}
    return {name: value for name, value in env.items() if name not in unsure}


def _shared(config: LaunchConfig, spec: AgentSpec, index: int, workers: int) -> dict[str, str]:
    """What the workers of a node share of the names in ``environ.NAMES``."""
    here = is_here(config)
    inherited: Mapping[str, str] = {**(os.environ if here else {}), **dict(config.remote.environ)}
    ours = {name: value for name, value in inherited.items() if name in environ.NAMES}
    mark = mark_of(f"{config.run_id}.<number>" if config.run_id else RUN_ID, preparation.hosts(config), index)
    shared = environ.shared_environ(ours, mark, workers, len(os.sched_getaffinity(0)))
    if not here and workers > 1 and "OMP_NUM_THREADS" not in ours:
        shared["OMP_NUM_THREADS"] = f"<CPUs of the node / {workers}>"
    if not config.dry_run and (config.is_led or config.meeting) and "GLOO_SOCKET_IFNAME" not in inherited:
        shared["GLOO_SOCKET_IFNAME"] = "<the interface where the nodes meet>"
    return shared


def _round(config: LaunchConfig, spec: AgentSpec, node_rank: int, sizes: tuple[int, ...]) -> Round:
    several = config.meeting or config.max_nodes > 1
    return Round(
        attempt=0,
        restarts=0,
        node_rank=node_rank,
        nnodes=len(sizes),
        first_rank=sum(sizes[:node_rank]),
        local_world_size=sizes[node_rank],
        world_size=sum(sizes),
        master_addr=_master_addr(config, spec),
        master_port=0 if several else spec.master_port or 0,
    )


def _master_addr(config: LaunchConfig, spec: AgentSpec) -> str:
    if config.dry_run and config.is_led:
        return "127.0.0.1"
    if config.meeting or config.is_led:
        return "<address of the first node>"
    return spec.master_addr or "127.0.0.1"


def _environ(
    config: LaunchConfig, spec: AgentSpec, node: NodePlan, shared: Mapping[str, str], round_: Round, local_rank: int
) -> dict[str, str]:
    """What ddplaunch sets for this worker."""
    error_file = f"{spec.log_dir}/attempt_0/{local_rank}/error.json" if spec.log_dir else ""
    env = environ.worker_environ(shared, spec, round_, local_rank, error_file)
    env[environ.RUN_ID] = env.pop(environ.RUN_ID)  # To the end: nobody asks for it.
    if not round_.master_port:
        env["MASTER_PORT"] = "<a free port>"
    devices = gpus_of_worker(spec, node.gpus, local_rank)
    return env if devices is None else {**env, "CUDA_VISIBLE_DEVICES": devices}
