"""Checks the user's options against the processes that a scheduler started; reports probable mistakes.

Runs in the launcher, before the configuration is built. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.cluster import slurm
from ddplaunch.errors import OptionError, UsageError
from ddplaunch.text import plural, quote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddplaunch.cluster.schedulers import SchedulerInfo
    from ddplaunch.cluster.task import ScheduledTask

ENDPOINT_HINT = "Give --rdzv-endpoint HOST:PORT, or export MASTER_ADDR and MASTER_PORT to all (mpirun -x, -genv)."

_WORKER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_counts(scheduler: SchedulerInfo, nproc_per_node: int | str | None, nnodes: tuple[int, int] | None) -> None:
    """Check the user's numbers of nodes and workers against those that the scheduler started.

    Args:
        scheduler: the scheduler; only the kinds ``node`` and ``task`` have counts.
        nproc_per_node: as in ``LaunchConfig``. For a task: 1, its node's number of tasks, or a word.
        nnodes: MIN and MAX; None without the option.

    Raises:
        UsageError: the numbers differ, or the tasks cannot be the workers of one job.
    """
    if scheduler.task is not None:
        _check_task(scheduler.name, scheduler.task, nproc_per_node)
    if scheduler.kind not in ("node", "task") or scheduler.agents is None or nnodes is None:
        return
    nodes = scheduler.agents if scheduler.task is None else len(scheduler.task.tasks_per_node)
    fewest = nodes if scheduler.task else 1
    if not fewest <= nnodes[0] <= nnodes[1] == nodes:
        expected = str(nodes) if nnodes[0] == nnodes[1] or scheduler.task else f"MIN:{nodes}"
        text = str(nnodes[1]) if nnodes[0] == nnodes[1] else f"{nnodes[0]}:{nnodes[1]}"
        raise OptionError(
            "--nnodes",
            text,
            f"{scheduler.name} started ddplaunch on {plural(nodes, 'node')}",
            f"Leave out --nnodes, or use {expected}. {slurm.IGNORE}",
        )


def _check_task(name: str, task: ScheduledTask, nproc_per_node: int | str | None) -> None:
    if isinstance(nproc_per_node, int) and nproc_per_node not in (1, task.local_world_size):
        raise OptionError(
            "--nproc-per-node",
            nproc_per_node,
            f"{name} started {task.local_world_size} tasks on this node, and each becomes one worker",
            f"Leave out the option, or start one task per node (srun --ntasks-per-node=1). {slurm.IGNORE}",
        )
    if len(set(task.tasks_per_node)) != 1:
        here = f"{task.world_size} in all, {task.local_world_size} here"
        counts = quote(", ".join(map(str, task.tasks_per_node)), 40) or here
        raise UsageError(
            f"{name} started different numbers of tasks on its nodes: {counts}",
            "Start equally many on each (srun --ntasks-per-node=N), or one per node, to get a worker per GPU.",
        )
    if task.node_rank is None:
        raise UsageError(
            f"{name} assigned consecutive ranks to different nodes: rank {task.rank} is local rank {task.local_rank}",
            f"Assign consecutive ranks to each node (mpirun --map-by ppr:{task.local_world_size}:node).",
        )


def missing_endpoint_error(scheduler: SchedulerInfo) -> UsageError | None:
    """The error for a run on several nodes without an endpoint; None if the scheduler names one."""
    if scheduler.agents == 1 or (scheduler.first_host and scheduler.ports):
        return None
    missing = "the port" if scheduler.first_host else "the host"
    return UsageError(
        f"{scheduler.name} started ddplaunch on several nodes without {missing} of their rendezvous",
        ENDPOINT_HINT,
    )


def own_rank_warning(scheduler: SchedulerInfo) -> str:
    """The warning, for one node, where the nodes take their ranks from the scheduler though the user gives 0."""
    why = ": the shell of a batch script makes 0 of $SLURM_NODEID" if scheduler.name == "SLURM" else ""
    return (
        f"--node-rank is 0 on a node that is {scheduler.index} by {scheduler.name}{why}; nodes without the "
        f"endpoint's address take the number of {scheduler.name}"
    )


def lint(
    scheduler: SchedulerInfo,
    environ: Mapping[str, str],
    *,
    workers: int | None = None,
    cpus: int | None = None,
    has_endpoint: bool = False,
    terminal: bool = False,
) -> tuple[str, ...]:
    """Probable mistakes, one sentence each, for the first node to print.

    Args:
        scheduler: the scheduler.
        environ: the environment of this process.
        workers: number of workers that this agent will start; None if unknown.
        cpus: number of CPUs that this process may use; None if unknown.
        has_endpoint: the user's options give the endpoint or this node's rank.
        terminal: standard input is a terminal.
    """
    return (
        *scheduler.warnings,
        *_outside_srun(scheduler, has_endpoint),
        *_interactive_shell(scheduler, terminal),
        *_few_cpus(scheduler, environ, workers, cpus),
        *_local_rank_without_gpu(scheduler, environ),
        *_stale_variables(scheduler, environ),
    )


def _outside_srun(scheduler: SchedulerInfo, has_endpoint: bool) -> Iterator[str]:
    if scheduler.kind == "allocation" and has_endpoint and len(scheduler.hosts) > 1:
        yield (
            "this is not a step of srun: it runs on one node only, and SLURM_NODEID and SLURM_PROCID are 0 there; "
            "put srun before ddplaunch, or leave out the options of the rendezvous"
        )


def _interactive_shell(scheduler: SchedulerInfo, terminal: bool) -> Iterator[str]:
    # Without --pty no task has a terminal, with --pty only the first.
    if terminal and scheduler.name == "SLURM" and scheduler.agents is not None and scheduler.agents > 1:
        yield (
            f"the run waits for all {scheduler.agents} tasks of this step, and a shell of srun --pty is one of them: "
            "use --cluster none in it, or srun --overlap"
        )


def _few_cpus(
    scheduler: SchedulerInfo, environ: Mapping[str, str], workers: int | None, cpus: int | None
) -> Iterator[str]:
    if workers is None or cpus is None:
        return
    advice = (
        "srun -c, --cpus-per-task, gives a task more"
        if scheduler.name == "SLURM"
        else f"see how {scheduler.name} binds processes"
    )
    here = environ.get("SLURM_CPUS_ON_NODE", "") if scheduler.name == "SLURM" and scheduler.kind == "node" else ""
    if cpus < workers:
        yield f"{plural(workers, 'worker')} on {plural(cpus, 'CPU')}, no more are allowed here: {advice}"
    elif here.isdecimal() and cpus < int(here) // 2:
        # Half of the CPUs can mean one hardware thread per core.
        yield f"{plural(cpus, 'CPU')} of the {here} that the step has on this node can be used: {advice}"


def _local_rank_without_gpu(scheduler: SchedulerInfo, environ: Mapping[str, str]) -> Iterator[str]:
    text, task = environ.get("CUDA_VISIBLE_DEVICES", ""), scheduler.task
    seen = len(text.split(","))
    if task and text and seen <= task.local_rank:
        yield (
            f"LOCAL_RANK is {task.local_rank} and this task sees only {plural(seen, 'GPU')}, so there is no "
            "cuda:$LOCAL_RANK: use --virtual-local-rank, or srun --gpu-bind=none"
        )


def _stale_variables(scheduler: SchedulerInfo, environ: Mapping[str, str]) -> Iterator[str]:
    """Variables that a container image or a script has set for workers; the run replaces them."""
    if scheduler.kind == "hosts":
        return
    expected = scheduler.task.environ() if scheduler.task else {}
    known = () if scheduler.name == "SLURM" else ("MASTER_ADDR", "MASTER_PORT")
    stale = [
        name
        for name in _WORKER_VARIABLES
        if environ.get(name, "") not in ("", expected.get(name)) and name not in known
    ]
    if stale:
        values = ", ".join(f"{name}={quote(environ[name], 40)}" for name in stale)
        yield f"the environment has {values} already, from an image or a script; ddplaunch replaces them"
