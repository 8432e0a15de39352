"""Checks the user's options against the processes that a scheduler started; reports probable mistakes.

Runs in the launcher, before the configuration is built. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ddplaunch.errors import OptionError, UsageError
from ddplaunch.features.schedulers.info import IGNORE_HINT, SchedulerInfo
from ddplaunch.text import plural, quote

if TYPE_CHECKING:
    from ddplaunch.cluster.scheduled import ScheduledTask

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
        _check_task(scheduler, scheduler.task, nproc_per_node)
    if scheduler.kind not in ("node", "task") or scheduler.launchers is None or nnodes is None:
        return
    nodes = scheduler.launchers if scheduler.task is None else len(scheduler.task.tasks_per_node)
    fewest = nodes if scheduler.task else 1
    if not fewest <= nnodes[0] <= nnodes[1] == nodes:
        expected = str(nodes) if nnodes[0] == nnodes[1] or scheduler.task else f"MIN:{nodes}"
        text = str(nnodes[1]) if nnodes[0] == nnodes[1] else f"{nnodes[0]}:{nnodes[1]}"
        raise OptionError(
            "--nnodes",
            text,
            f"{scheduler.name} started ddplaunch on {plural(nodes, 'node')}",
            f"Leave out --nnodes, or use {expected}. {IGNORE_HINT}",
        )


def _check_task(scheduler: SchedulerInfo, task: ScheduledTask, nproc_per_node: int | str | None) -> None:
    name, per_node = scheduler.name, scheduler.advice.per_node
    if isinstance(nproc_per_node, int) and nproc_per_node not in (1, task.local_world_size):
        raise OptionError(
            "--nproc-per-node",
            nproc_per_node,
            f"{name} started {task.local_world_size} tasks on this node, and each becomes one worker",
            f"Leave out the option, or start one task per node ({per_node.format(1)}). {IGNORE_HINT}",
        )
    if len(set(task.tasks_per_node)) != 1:
        here = f"{task.world_size} in all, {task.local_world_size} here"
        counts = quote(", ".join(map(str, task.tasks_per_node)), 40) or here
        raise UsageError(
            f"{name} started different numbers of tasks on its nodes: {counts}",
            f"Start equally many on each ({per_node.format('N')}), or one per node, to get a worker per GPU.",
        )
    if task.node_rank is None:
        raise UsageError(
            f"{name} assigned consecutive ranks to different nodes: rank {task.rank} is local rank {task.local_rank}",
            f"Assign consecutive ranks to each node ({per_node.format(task.local_world_size)}).",
        )


def check_endpoint(scheduler: SchedulerInfo) -> None:
    """Check that one of several launchers knows where they meet.

    Raises:
        UsageError: neither the variables nor ``find_endpoint`` name host and port of the rendezvous.
    """
    if not (scheduler.first_host and scheduler.ports):
        missing = "the port" if scheduler.first_host else "the host"
        message = f"{scheduler.name} started ddplaunch on several nodes without {missing} of their rendezvous"
        raise UsageError(message, endpoint_hint(scheduler))


def endpoint_hint(scheduler: SchedulerInfo) -> str:
    """What the user can do if the launchers do not know where they meet."""
    how = f" ({scheduler.advice.export})" if scheduler.advice.export else ""
    return f"Give --rdzv-endpoint HOST:PORT, or export MASTER_ADDR and MASTER_PORT to all{how}."


def own_rank_warning(scheduler: SchedulerInfo) -> str:
    """The warning, for one node, where the nodes take their ranks from the scheduler though the user gives 0."""
    why = scheduler.advice.node_rank and f": {scheduler.advice.node_rank}"
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
        *([scheduler.endpoint_warning] if has_endpoint and scheduler.endpoint_warning else []),
        *_interactive_shell(scheduler, terminal),
        *_few_cpus(scheduler, workers, cpus),
        *_local_rank_without_gpu(scheduler, environ),
        *_stale_variables(scheduler, environ),
    )


def _interactive_shell(scheduler: SchedulerInfo, terminal: bool) -> Iterator[str]:
    # Without srun's --pty no task has a terminal, with --pty only the first.
    if terminal and scheduler.advice.shell and scheduler.launchers is not None and scheduler.launchers > 1:
        yield f"the run waits for all {scheduler.launchers} tasks of this step, and {scheduler.advice.shell}"


def _few_cpus(scheduler: SchedulerInfo, workers: int | None, cpus: int | None) -> Iterator[str]:
    if workers is None or cpus is None:
        return
    advice = scheduler.advice.cpus or f"see how {scheduler.name} binds processes"
    if cpus < workers:
        yield f"{plural(workers, 'worker')} on {plural(cpus, 'CPU')}, no more are allowed here: {advice}"
    elif scheduler.cpus and cpus < scheduler.cpus // 2:
        # Half of the CPUs can mean one hardware thread per core.
        yield f"{plural(cpus, 'CPU')} of the {scheduler.cpus} that the step has on this node can be used: {advice}"


def _local_rank_without_gpu(scheduler: SchedulerInfo, environ: Mapping[str, str]) -> Iterator[str]:
    text, task = environ.get("CUDA_VISIBLE_DEVICES", ""), scheduler.task
    seen = len(text.split(","))
    if task and text and seen <= task.local_rank:
        gpus = scheduler.advice.gpus and f", or {scheduler.advice.gpus}"
        yield (
            f"LOCAL_RANK is {task.local_rank} and this task sees only {plural(seen, 'GPU')}, so there is no "
            f"cuda:$LOCAL_RANK: use --virtual-local-rank{gpus}"
        )


def _stale_variables(scheduler: SchedulerInfo, environ: Mapping[str, str]) -> Iterator[str]:
    """Variables that a container image or a script has set for workers; the run replaces them."""
    expected = scheduler.task.environ() if scheduler.task else {}
    stale = [
        name
        for name in _WORKER_VARIABLES
        if environ.get(name, "") not in ("", expected.get(name)) and name not in scheduler.user_variables
    ]
    if stale:
        values = ", ".join(f"{name}={quote(environ[name], 40)}" for name in stale)
        yield f"the environment has {values} already, from an image or a script; ddplaunch replaces them"
