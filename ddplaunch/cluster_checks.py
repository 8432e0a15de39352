"""Does what a scheduler started agree with what the user asks for, and is it likely meant? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch import slurm
from ddplaunch.errors import UsageError
from ddplaunch.printable import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddplaunch.detected import Detected
    from ddplaunch.task import Task

_STALE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_counts(detected: Detected, nproc_per_node: int | str | None, nnodes: tuple[int, int] | None) -> None:
    """Refuses counts that the user gave and the scheduler did not start.

    Args:
        detected: what started ddplaunch; only ``node`` and ``task`` have counts.
        nproc_per_node: as in ``LaunchConfig``. For a task 1, or as many as its node has, or a word, is welcome.
        nnodes: MIN and MAX; None where the user does not say.

    Raises:
        UsageError: they disagree, or the tasks cannot be the workers of one job.
    """
    if detected.task is not None:
        _check_task(detected.name, detected.task, nproc_per_node)
    if detected.kind not in ("node", "task") or detected.agents is None or nnodes is None:
        return
    nodes = detected.agents if detected.task is None else len(detected.task.tasks_per_node)
    fewest = nodes if detected.task else 1
    if not fewest <= nnodes[0] <= nnodes[1] == nodes:
        wanted = str(nodes) if nnodes[0] == nnodes[1] or detected.task else f"MIN:{nodes}"
        text = str(nnodes[1]) if nnodes[0] == nnodes[1] else f"{nnodes[0]}:{nnodes[1]}"
        raise UsageError(
            f"--nnodes {text}: {detected.name} started ddplaunch on {_count(nodes, 'node')}",
            f"Leave --nnodes out, or say {wanted}. {slurm.IGNORE}",
        )


def _check_task(name: str, task: Task, nproc_per_node: int | str | None) -> None:
    if isinstance(nproc_per_node, int) and nproc_per_node not in (1, task.local_world_size):
        raise UsageError(
            f"--nproc-per-node {nproc_per_node}: {name} started {task.local_world_size} tasks on this node, and each "
            "becomes one worker",
            f"Leave the option out, or start one task per node (srun --ntasks-per-node=1). {slurm.IGNORE}",
        )
    if len(set(task.tasks_per_node)) != 1:
        here = f"{task.world_size} in all, {task.local_world_size} here"
        counts = shown(", ".join(map(str, task.tasks_per_node)), 40) or here
        raise UsageError(
            f"{name} started different numbers of tasks on its nodes: {counts}",
            "Start as many on each (srun --ntasks-per-node=N), or one per node, which then starts a worker per GPU.",
        )
    if task.node_rank is None:
        raise UsageError(
            f"{name} dealt the ranks out to the nodes in turn: rank {task.rank} is local rank {task.local_rank}",
            f"Let each node have consecutive ranks (mpirun --map-by ppr:{task.local_world_size}:node).",
        )


def needs_endpoint(detected: Detected) -> UsageError | None:
    """The error for a run on several nodes of which nobody says where they meet; None if the scheduler says."""
    if detected.agents == 1 or (detected.first_host and detected.ports):
        return None
    lacking = "port they meet at" if detected.first_host else "node they meet on"
    return UsageError(
        f"{detected.name} started ddplaunch on several nodes, and does not say which {lacking}",
        "Give --rdzv-endpoint HOST:PORT, or export MASTER_ADDR and MASTER_PORT to all of them (mpirun -x, -genv).",
    )


def lint(
    detected: Detected,
    environ: Mapping[str, str],
    *,
    workers: int | None = None,
    cpus: int | None = None,
    meets_itself: bool = False,
    terminal: bool = False,
) -> tuple[str, ...]:
    """What is likely not meant, a sentence each; to be said once, by the first node.

    Args:
        detected: what started ddplaunch.
        environ: what it was detected in.
        workers: how many this agent will start; None if not known yet, likewise ``cpus``.
        cpus: how many CPUs this process may use.
        meets_itself: the user says with options where the nodes meet, or which one this is.
        terminal: standard input is one.
    """
    return (
        *detected.warnings,
        *_batch_scope(detected, meets_itself),
        *_shell(detected, terminal),
        *_narrow(detected, environ, workers, cpus),
        *_few_devices(detected, environ),
        *_stale(detected, environ),
    )


def _batch_scope(detected: Detected, meets_itself: bool) -> Iterator[str]:
    if detected.kind == "allocation" and meets_itself and len(detected.hosts) > 1:
        yield (
            "this is not a step of srun: it runs on one node only, and SLURM_NODEID and SLURM_PROCID are 0 there; "
            "put srun before ddplaunch, or leave out where the nodes meet"
        )


def _shell(detected: Detected, terminal: bool) -> Iterator[str]:
    # Without --pty no task has a terminal, and with it only the first.
    if terminal and detected.name == "SLURM" and detected.agents is not None and detected.agents > 1:
        yield (
            f"all {detected.agents} tasks of this step are waited for, and a shell of srun --pty is only one of them: "
            "use --cluster none there, or srun --overlap"
        )


def _narrow(detected: Detected, environ: Mapping[str, str], workers: int | None, cpus: int | None) -> Iterator[str]:
    if workers is None or cpus is None:
        return
    remedy = "srun -c, --cpus-per-task, gives a task more" if detected.name == "SLURM" else "see how it binds processes"
    here = environ.get("SLURM_CPUS_ON_NODE", "") if detected.name == "SLURM" and detected.kind == "node" else ""
    if cpus < workers:
        yield f"{_count(workers, 'worker')} on {_count(cpus, 'CPU')}, no more are allowed here: {remedy}"
    elif here.isdecimal() and cpus < int(here) // 2:
        # Half of them is one hardware thread per core.
        yield f"{_count(cpus, 'CPU')} of the {here} that the step has on this node are allowed: {remedy}"


def _few_devices(detected: Detected, environ: Mapping[str, str]) -> Iterator[str]:
    text, task = environ.get("CUDA_VISIBLE_DEVICES", ""), detected.task
    seen = len(text.split(","))
    if task and text and seen <= task.local_rank:
        yield (
            f"LOCAL_RANK is {task.local_rank} and this task sees only {_count(seen, 'GPU')}, so there is no "
            "cuda:$LOCAL_RANK: use --virtual-local-rank, or srun --gpu-bind=none"
        )


def _stale(detected: Detected, environ: Mapping[str, str]) -> Iterator[str]:
    """What a container image or a script has set for the workers, and the run replaces."""
    if detected.kind == "hosts":
        return
    right = detected.task.environ() if detected.task else {}
    known = () if detected.name == "SLURM" else ("MASTER_ADDR", "MASTER_PORT")
    stale = [name for name in _STALE if environ.get(name, "") not in ("", right.get(name)) and name not in known]
    if stale:
        said = ", ".join(f"{name}={shown(environ[name], 40)}" for name in stale)
        yield f"the environment has {said} already, from an image or a script; ddplaunch sets its own"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
