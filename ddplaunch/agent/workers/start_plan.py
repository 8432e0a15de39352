"""How this node's workers start: by fork or exec; how many, with which devices, CPUs, environment and command line.

Runs in the agent, before the first attempt and once per worker. It reads this machine's devices; it must not start a
process (see ``forkserver_client``), or load torch or CUDA.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import environment
from ddplaunch.protocol.agent_entry import PACKAGE_ROOT, is_own_module
from ddplaunch.protocol.specs import AgentSpec, ForkserverSpec, ImportFailed, ProcessSpec, Program, StartPlan
from ddplaunch.system import devices
from ddplaunch.system.files import script_file
from ddplaunch.system.files.script_file import working_folder

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.protocol.results import Round

EXEC_WORKER = str(Path(PACKAGE_ROOT, "ddplaunch", "worker", "exec_worker.py"))
"""Started by its path: the agent must not import the worker package. A test checks that the file exists."""


# The program, and the forkserver.


def check_program(program: Program, host: str, path_variable: str) -> None:
    """Check for errors that would make every worker fail.

    Raises:
        LaunchError: the script, program or interpreter is missing or not usable on ``host``.
    """
    working_folder()  # Without a working folder, torch cannot be imported.
    if program.entry == "program":
        if shutil.which(program.path, path=path_variable) is None:
            raise LaunchError(
                f"{program.path}: no such program on {host}, or it is not executable",
                "With --no-python give a path, or a program that is in PATH, and check its x permission.",
            )
        return
    if shutil.which(program.python, path=path_variable) is None:
        raise LaunchError(f"{program.python}: no such interpreter on {host}", "Check PYTHON_EXEC.")
    if program.entry == "script" and not program.text:
        script_file.check_readable(program.path, host)


def forkserver_spec(spec: AgentSpec, plan: StartPlan) -> ForkserverSpec:
    """The forkserver's first record, for ``plan``."""
    forks, path = plan.how != "exec", spec.program.path
    is_file = plan.how in ("script", "function") and path != "-"
    folder = os.path.dirname(os.path.realpath(path)) if is_file else working_folder()
    return ForkserverSpec(
        run_id=spec.run_id,
        agent_pid=os.getpid(),
        workers=spec.workers,
        imports=forks,
        script=path if is_file else "",
        script_dir=folder if forks and not is_own_module(path) else "",
        module=path if plan.how == "module" and not is_own_module(path) else "",
    )


def import_error(host: str, failed: ImportFailed) -> LaunchError:
    """The error for the user if the forkserver cannot import a module."""
    if failed.hidden_by:
        hint = f"Rename {failed.hidden_by}: it hides the module of this name that {failed.module} needs."
    elif failed.module.split(".")[0] == "torch":
        hint = f"Install torch for {sys.executable}, or run ddplaunch from the environment that has it."
    else:
        hint = "Remove it from --preload, or install it."
    return LaunchError(f"{host}: {failed.module} cannot be imported\n{failed.error}", hint)


# The places of the workers.


@dataclass(frozen=True)
class Placement:
    """Placement of this node's workers. Tuples are in order of local rank; None keeps the inherited setting.

    ``visible`` are all devices that the workers may use; a worker without assigned ones probably uses that of its local
    rank. ``bindings`` are those of ``ProcessSpec``; none: empty.
    """

    local_world_size: int
    device_variable: str
    devices: tuple[tuple[str, ...], ...] | None
    shared_environ: dict[str, str]
    visible: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()

    def devices_of(self, local_rank: int) -> tuple[str, ...]:
        """The GPUs that a worker probably uses: indices or UUIDs, as in CUDA_VISIBLE_DEVICES."""
        return self.devices[local_rank] if self.devices else self.visible[local_rank : local_rank + 1]


def place_workers(spec: AgentSpec, inherited: Mapping[str, str]) -> Placement:
    """Assign the node's devices and CPUs to its workers.

    Raises:
        UsageError: too many workers for the chosen devices, an unknown device, or no GPU where one is required.
    """
    try:
        visible = _simulated_gpus(spec) if spec.dry_run else devices.visible_devices(inherited, spec.workers.gpus)
        nproc = devices.resolve_nproc(spec.workers.nproc_per_node, visible, spec.workers.gpus_per_proc)
        if spec.dry_run:
            visible = visible or tuple(map(str, range(nproc * max(1, spec.workers.gpus_per_proc))))
        assigned = _assign_task(spec, visible) if spec.task else _assign_devices(spec, visible, nproc)
        bindings = _bindings(spec, visible, nproc)
    except ValueError as error:
        raise UsageError(f"{error} (on {spec.host})") from None
    # The run tag is unique among the runs on a machine, the run id is not.
    node_tag = inherited.get(environment.RUN_ID, spec.run_id)
    sharers = _workers_on_shared_cpus(spec) or nproc
    shared = environment.shared_environ(inherited, node_tag, sharers, len(os.sched_getaffinity(0)))
    for module in features.modules("environ"):
        shared |= module.shared_environ(spec, inherited, sharers)
    variable = "CUDA_VISIBLE_DEVICES" if spec.dry_run else devices.visibility_variable(inherited)
    return Placement(nproc, variable, assigned, shared, visible or (), bindings)


def _simulated_gpus(spec: AgentSpec) -> tuple[str, ...] | None:
    """The GPUs of --gpus in a dry run; None: as many as the workers need."""
    if spec.workers.gpus is None and spec.workers.nproc_per_node in ("gpu", "auto", "xpu"):
        raise ValueError(
            f"--nproc-per-node {spec.workers.nproc_per_node}: give the GPUs of a node, for example --gpus 0,1,2,3"
        )
    return spec.workers.gpus


def _assign_devices(spec: AgentSpec, visible: tuple[str, ...] | None, nproc: int) -> tuple[tuple[str, ...], ...] | None:
    if spec.workers.virtual_local_rank:
        # As in torchrun: device LOCAL_RANK unless the user chose devices.
        names = tuple(map(str, range(nproc))) if visible is None else visible
        return tuple(devices.devices_of(local_rank, names, 1, nproc) for local_rank in range(nproc))
    if spec.workers.gpus_per_proc:
        return tuple(devices.devices_of(i, visible or (), spec.workers.gpus_per_proc, nproc) for i in range(nproc))
    return (spec.workers.gpus,) * nproc if spec.workers.gpus else None


def _assign_task(spec: AgentSpec, visible: tuple[str, ...] | None) -> tuple[tuple[str, ...], ...] | None:
    """Devices of the only worker: those that the scheduler assigned, or its share of the node's devices."""
    per_worker = 1 if spec.workers.virtual_local_rank else spec.workers.gpus_per_proc
    if spec.task is None or not per_worker:
        return _assign_devices(spec, visible, 1)
    names = tuple(map(str, range(spec.task.local_world_size))) if visible is None else visible
    if len(names) == per_worker:
        return (names,)
    return (devices.devices_of(spec.task.local_rank, names, per_worker, spec.task.local_world_size),)


def _workers_on_shared_cpus(spec: AgentSpec) -> int:
    """Number of the node's workers that share the CPUs of this process, where each has an agent; otherwise 0."""
    is_bound = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    return 0 if spec.task is None or is_bound else spec.task.local_world_size


def _bindings(spec: AgentSpec, visible: tuple[str, ...] | None, nproc: int) -> tuple[str, ...]:
    """To which CPUs and memory each worker is bound; empty if they are not bound."""
    is_possible = not spec.dry_run and (visible or spec.workers.numa_binding != "auto")
    modules = features.modules("cpus") if is_possible and spec.workers.numa_binding != "off" else ()
    return next((module.of_workers(spec, visible, nproc) for module in modules), ())


# One worker.


def worker_spec(
    spec: AgentSpec,
    plan: StartPlan,
    placement: Placement,
    round_: Round,
    worker: Worker,
    defaults: Mapping[str, str],
    texts: Mapping[str, str],
) -> ProcessSpec:
    """The ProcessSpec of one worker, with the complete environment.

    ``defaults`` have the lowest precedence; ``texts`` are for parts of the worker, by name of the feature.
    """
    local_rank = worker.local_rank
    shared = {**defaults, **placement.shared_environ}
    error_file, request_file = str(worker.error_file or ""), worker.open_request_file()
    env = environment.worker_environ(shared, spec, round_, local_rank, error_file, request_file)
    if plan.bootstrap:
        env |= {features.text_variable(name): text for name, text in texts.items()}
    if spec.dry_run:  # The inherited value names this machine's GPUs, not the simulated ones.
        env.pop(placement.device_variable, None)
    if placement.devices is not None:
        env[placement.device_variable] = ",".join(placement.devices[local_rank])
    return ProcessSpec(
        tag=f"{round_.attempt}/{local_rank}",
        how=plan.how,
        argv=_worker_argv(spec, plan, spec.task.local_rank if spec.task else local_rank),
        env=env,
        binding=placement.bindings[local_rank] if placement.bindings else "",
    )


def _worker_argv(spec: AgentSpec, plan: StartPlan, local_rank: int) -> tuple[str, ...]:
    """The worker's ``ProcessSpec.argv`` for ``plan.how``."""
    program = spec.program
    local_rank_argument = (f"--local-rank={local_rank}",) if spec.workers.pass_local_rank else ()
    script = (program.path, *local_rank_argument, *program.args)
    if plan.how != "exec" or program.entry == "program":
        return script
    bootstrap: tuple[str, ...] = (EXEC_WORKER,) if plan.bootstrap else ()
    flag = {"module": ("-m",), "function": ("--function",)}.get(program.entry, ())
    return (program.python, "-u", *bootstrap, *flag, *script)
