"""What SLURM tells a process through its environment: the step it is a task of, or the allocation it is in. Pure.

A step's facts come from ``SLURM_STEP_*`` and what slurmstepd sets for each task, never from their look-alikes of the
job: a batch script too has SLURM_PROCID, SLURM_NODEID and SLURM_LOCALID, all 0. Needs no ``scontrol``, which containers
do not have. Read in SLURM's sources, 22.05 and 26.11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError
from ddplaunch.host_ranges import MAX_HOSTS, expand
from ddplaunch.job import Job
from ddplaunch.printable import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

IGNORE = "`--cluster none` makes ddplaunch ignore it."

SRUN_DEFAULTS = ("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE")
"""slurmstepd sets these to tell a task its binding, and srun reads the first as its ``--cpu-bind``: an ``srun`` that is
started inside a step must not inherit them."""

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on ids are not of steps that srun made: the batch script is 0xfffffffb (shown as -5 since 26.05, not set
before), salloc's shell on a compute node 0xfffffffa."""


@dataclass(frozen=True)
class Step:
    """A step that srun started, as one of its tasks sees it.

    Attributes:
        hosts: the step's nodes as SLURM names them, in its order; ``tasks_per_node`` is in the same order.
        node_id: this node's place in ``hosts``.
        rank: this task's number in the step. With one task per node it is ``node_id``, but with ``-m arbitrary``.
        restarts: how often SLURM has requeued the job; the steps of a job are numbered from 0 each time.
        reserved_ports: what ``srun --resv-ports`` reserved, on all nodes of the step; mostly empty.
    """

    job_id: str
    step_id: str
    restarts: int
    hosts: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    node_id: int
    rank: int
    local_rank: int
    reserved_ports: tuple[int, ...]


@dataclass(frozen=True)
class Allocation:
    """A job's nodes, as its batch script or salloc's shell sees them; of a heterogeneous job those of one component."""

    job_id: str
    restarts: int
    hosts: tuple[str, ...]


def read_job(environ: Mapping[str, str]) -> Job | None:
    """The job this process is in, also in a step of it; None outside of any."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    number = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return Job(number, int(restarts) if restarts.isdecimal() else 0) if number else None


def read_step(environ: Mapping[str, str]) -> Step | None:
    """The step this process is a task of; None outside of one, also where its variables were only left over.

    Raises:
        UsageError: the variables contradict each other, or cannot be read.
    """
    step_id = environ.get("SLURM_STEP_ID", "")
    if not ("SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ and _is_of_srun(step_id)):
        return None
    hosts = parse_node_list(environ["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST")
    # sbatch passes on the environment it is called in: a batch script can have the variables of a step that ended.
    # slurmstepd sets this one for every task and every batch script, and so it is never an old one on a compute node.
    if environ.get("SLURMD_NODENAME", hosts[0]) not in hosts:
        return None
    step = Step(
        job_id=_text(environ, "SLURM_JOB_ID"),
        step_id=step_id,
        restarts=_restarts(environ),
        hosts=hosts,
        tasks_per_node=parse_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE"),
        node_id=_number(environ, "SLURM_NODEID"),
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        reserved_ports=_reserved_ports(environ.get("SLURM_STEP_RESV_PORTS", "")),
    )
    _check(step, _number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_STEP_NUM_TASKS"))
    return step


def _is_of_srun(step_id: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,10}", step_id)) and int(step_id) < _FIRST_SPECIAL_STEP


def _check(step: Step, nodes: int, tasks: int) -> None:
    per_node = step.tasks_per_node
    agree = (
        len(step.hosts) == len(per_node) == nodes > step.node_id
        and sum(per_node) == tasks > step.rank
        and per_node[step.node_id] > step.local_rank
    )
    if not agree:
        raise UsageError(
            f"SLURM_STEP_NODELIST names {len(step.hosts)} nodes, SLURM_STEP_NUM_NODES is {nodes}, "
            f"SLURM_STEP_NUM_TASKS {tasks}, SLURM_STEP_TASKS_PER_NODE {shown(','.join(map(str, per_node)), 40)}, "
            f"SLURM_NODEID {step.node_id}, SLURM_PROCID {step.rank}, SLURM_LOCALID {step.local_rank}: "
            "they contradict each other",
            f"One of them is left over from another step or job. {IGNORE}",
        )


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The job this process is in; None outside of any. Ask ``read_step`` first: a step is in a job too.

    Raises:
        UsageError: the list of nodes cannot be read.
    """
    if not (environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST")):
        return None
    hosts = parse_node_list(environ["SLURM_JOB_NODELIST"], "SLURM_JOB_NODELIST")
    return Allocation(environ["SLURM_JOB_ID"], _restarts(environ), hosts)


def parse_node_list(text: str, source: str = "the node list") -> tuple[str, ...]:
    """The names that SLURM's ``n[01-03,7],login`` stands for, in its order.

    Raises:
        UsageError: not a list of names; ``source`` begins the message.
    """
    names: list[str] = []
    for pattern in re.split(r",(?![^\[]*\])", text.strip()):
        if not re.fullmatch(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+", pattern) or pattern.startswith(("-", ".")):
            hint = f"A list is like n[01-03,7],login. {IGNORE}"
            raise UsageError(f"{source}={shown(text)}: not a list of SLURM's nodes", hint)
        try:
            names += expand(pattern)
        except UsageError as error:
            raise UsageError(f"{source}={shown(text)}: {error.message}", IGNORE) from None
        if len(names) > MAX_HOSTS:
            raise UsageError(f"{source}={shown(text)}: stands for more than {MAX_HOSTS:,} hosts", IGNORE)
    return tuple(names)


def parse_counts(text: str, source: str = "the counts") -> tuple[int, ...]:
    """One count per node of SLURM's ``8(x3),4``: 8, 8, 8, 4.

    Raises:
        UsageError: anything else, a count of 0, or too many; ``source`` begins the message.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not (count and times and len(counts) + times <= MAX_HOSTS):
            raise UsageError(f"{source}={shown(text)}: not a list of counts like 8(x3),4", IGNORE)
        counts += [count] * times
    return tuple(counts)


def lint(environ: Mapping[str, str], step: Step | None) -> Iterator[str]:
    """What in SLURM's variables is likely not meant, a sentence each."""
    if step is None:
        binding = environ.get("SLURM_CPU_BIND", "")
        # In a batch script and in salloc's shell SLURM sets none of its own.
        if re.search(r"(map|mask)_", binding):
            yield (
                f"SLURM_CPU_BIND={shown(binding, 40)} is left over from the step this job was submitted in, and every "
                "srun takes it as its --cpu-bind: unset it before srun"
            )
        if environ.get("SLURM_HET_SIZE"):
            yield "of a heterogeneous job only the first component's nodes are used without srun --het-group"
        return
    job = read_allocation(environ)
    if job and not set(step.hosts) <= set(job.hosts):
        yield "SLURM_STEP_NODELIST has nodes that SLURM_JOB_NODELIST has not: one of them is of another job"
    # Names are tried in both orders only where there are several tasks: one task per node is contiguous anyway.
    if step.rank != sum(step.tasks_per_node[: step.node_id]) + step.local_rank and max(step.tasks_per_node) > 1:
        yield "ranks do not follow each other on a node, and many programs expect that: srun --distribution=block"


def _reserved_ports(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    if not re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", text):
        raise UsageError(f"SLURM_STEP_RESV_PORTS={shown(text)}: not a list of ports like 12000-12003", IGNORE)
    ports = tuple(map(int, parse_node_list(f"[{text}]", "SLURM_STEP_RESV_PORTS")))
    return tuple(port for port in ports if 0 < port < 65536)


def _restarts(environ: Mapping[str, str]) -> int:
    # Not set where the job was not requeued (before 26.05), nor with srun --export=NONE.
    return _number(environ, "SLURM_RESTART_COUNT") if environ.get("SLURM_RESTART_COUNT") else 0


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{name}={shown(text)}: must be a whole number", IGNORE)
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(f"SLURM_STEP_NODELIST is set and {name} is not", f"srun sets both. {IGNORE}")
    return environ[name]
