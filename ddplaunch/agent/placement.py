"""What this node contributes to a run and where its workers sit: how many, with which devices, CPUs and environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddplaunch import environ, stacks
from ddplaunch.agent import devices, numa
from ddplaunch.agent.program import StartPlan, arguments
from ddplaunch.errors import UsageError
from ddplaunch.records import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.agent.worker import Worker
    from ddplaunch.config import Rehearsal  # noqa: TC004
    from ddplaunch.model import AgentSpec, Round


@dataclass(frozen=True)
class Placement:
    """This node's part. Per-worker tuples are in order of local rank; None leaves the setting as inherited."""

    local_world_size: int
    device_variable: str
    devices: tuple[tuple[str, ...], ...] | None
    cpus: tuple[frozenset[int], ...] | None
    shared_environ: dict[str, str]
    rehearsal: Rehearsal | None = None


def place(spec: AgentSpec, inherited: Mapping[str, str]) -> Placement:
    """Count the devices and give each worker its own.

    Raises:
        UsageError: more workers than the named devices allow, unknown devices, no GPU where one is asked for.
    """
    try:
        visible = _pretended(spec) if spec.rehearsal else devices.visible_devices(inherited, spec.gpus)
        nproc = devices.resolve_nproc(spec.nproc_per_node, visible, spec.gpus_per_proc)
        if spec.rehearsal:
            visible = visible or tuple(map(str, range(nproc * max(1, spec.gpus_per_proc))))
        assigned = _assign_task(spec, visible) if spec.task else _assign(spec, visible, nproc)
        cpus = _bind(spec, visible, nproc)
    except ValueError as error:
        raise UsageError(f"{error} (on {spec.host})") from None
    # The launcher's mark of this run; two runs at once may have the same run_id.
    mark = inherited.get(environ.RUN_ID, spec.run_id)
    shared = environ.shared_environ(inherited, mark, _sharers(spec) or nproc, len(os.sched_getaffinity(0)))
    rehearsal = spec.rehearsal and replace(spec.rehearsal, gpus=_gpus_of(visible or ()))
    variable = "CUDA_VISIBLE_DEVICES" if rehearsal else devices.visibility_variable(inherited)
    return Placement(nproc, variable, assigned, cpus, shared, rehearsal)


def _pretended(spec: AgentSpec) -> tuple[str, ...] | None:
    """The GPUs that a dry run's user names; None for as many as the workers need."""
    if spec.gpus is None and spec.nproc_per_node in ("gpu", "auto", "xpu"):
        raise ValueError(
            f"--nproc-per-node {spec.nproc_per_node}: say how many GPUs a node has, as with --gpus 0,1,2,3"
        )
    return spec.gpus


def _gpus_of(visible: tuple[str, ...]) -> int:
    """How many a node must have so that these are among them."""
    return max(len(visible), *(int(name) + 1 for name in visible if name.isdigit()), 0)


def _assign(spec: AgentSpec, visible: tuple[str, ...] | None, nproc: int) -> tuple[tuple[str, ...], ...] | None:
    if spec.virtual_local_rank:
        # torchrun names device LOCAL_RANK where the user named none.
        named = tuple(map(str, range(nproc))) if visible is None else visible
        return tuple(devices.devices_of(local_rank, named, 1, nproc) for local_rank in range(nproc))
    if spec.gpus_per_proc:
        return tuple(devices.devices_of(i, visible or (), spec.gpus_per_proc, nproc) for i in range(nproc))
    return (spec.gpus,) * nproc if spec.gpus else None


def _assign_task(spec: AgentSpec, visible: tuple[str, ...] | None) -> tuple[tuple[str, ...], ...] | None:
    """For the one worker here: those that its scheduler left it, or its share of those of the node."""
    per_worker = 1 if spec.virtual_local_rank else spec.gpus_per_proc
    if spec.task is None or not per_worker:
        return _assign(spec, visible, 1)
    named = tuple(map(str, range(spec.task.local_world_size))) if visible is None else visible
    if len(named) == per_worker:
        return (named,)
    return (devices.devices_of(spec.task.local_rank, named, per_worker, spec.task.local_world_size),)


def _sharers(spec: AgentSpec) -> int:
    """How many workers share the CPUs of this process; 0 where those are its own."""
    is_bound = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    return 0 if spec.task is None or is_bound else spec.task.local_world_size


def _bind(spec: AgentSpec, visible: tuple[str, ...] | None, nproc: int) -> tuple[frozenset[int], ...] | None:
    if spec.numa_binding is None or spec.rehearsal:
        return None
    per_worker = max(1, spec.gpus_per_proc)
    if not visible or nproc * per_worker > len(visible):
        raise ValueError(
            f"--numa-binding needs a GPU for each of {nproc} workers, and {len(visible or ())} can be used"
        )
    addresses = tuple(devices.pci_address(visible[i * per_worker]) for i in range(nproc))
    allowed = frozenset(os.sched_getaffinity(0))
    return tuple(numa.cpus_for(spec.numa_binding, i, addresses, allowed) for i in range(nproc))


def worker_spec(
    spec: AgentSpec,
    plan: StartPlan,
    placement: Placement,
    round_: Round,
    worker: Worker,
    defaults: Mapping[str, str],
) -> WorkerSpec:
    """One worker as the forkserver is asked for it, with its complete environment.

    ``defaults`` are variables that it gets where nobody has set them.
    """
    local_rank = worker.local_rank
    shared = {**defaults, **placement.shared_environ}
    env = environ.worker_environ(shared, spec, round_, local_rank, str(worker.error_file or ""))
    if spec.hang_timeout_s is not None and plan.bootstrap:
        env[stacks.VARIABLE] = str(worker.stacks_file or "/dev/stderr")
    if placement.rehearsal:  # What it says is of this machine's GPUs.
        env.pop(placement.device_variable, None)
    if placement.devices is not None:
        env[placement.device_variable] = ",".join(placement.devices[local_rank])
    return WorkerSpec(
        tag=f"{round_.attempt}/{local_rank}",
        how=plan.how,
        argv=arguments(spec, plan, spec.task.local_rank if spec.task else local_rank, placement.rehearsal),
        env=env,
        cpus=placement.cpus[local_rank] if placement.cpus else None,
        rehearsal=placement.rehearsal,
    )
