"""Reads SLURM's environment variables: the job, the allocation, and the step of this process.

Runs in the launcher. Pure. A step's facts come from ``SLURM_STEP_*`` and the variables that slurmstepd sets for each
task, never from similar variables of the job: in a batch script SLURM_PROCID, SLURM_NODEID and SLURM_LOCALID exist and
are 0. Must not run ``scontrol``, which containers lack. Source: SLURM's source code, 22.05 and 26.11.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ddplaunch.cluster.hosts import MAX_HOSTS, Host, expand, fold
from ddplaunch.cluster.scheduled import ScheduledTask, SlurmJob
from ddplaunch.errors import UsageError
from ddplaunch.features.schedulers.info import IGNORE_HINT, LOOPBACK, Advice, SchedulerInfo, candidate_ports
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import plural, quote

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Lowest id of a step that is not srun's: the batch script is 0xfffffffb (shown as -5 since 26.05, not set before),
salloc's shell on a compute node 0xfffffffa."""


_OUTSIDE_SRUN = (
    "this is not a step of srun: it runs on one node only, and SLURM_NODEID and SLURM_PROCID are 0 there; put srun "
    "before ddplaunch, or leave out the options of the rendezvous"
)


_SRUN = Advice(
    per_node="srun --ntasks-per-node={}",
    cpus="srun -c, --cpus-per-task, gives a task more",
    gpus="srun --gpu-bind=none",
    shell="a shell of srun --pty is one of them: use --cluster none in it, or srun --overlap",
    node_rank="the shell of a batch script makes 0 of $SLURM_NODEID",
)


@dataclass(frozen=True)
class Step:
    """A step that srun started, as one of its tasks sees it.

    Attributes:
        requeue_count: how often SLURM has requeued the job; after each requeue the steps are numbered from 0.
        hosts: names of the step's nodes in SLURM's order.
        tasks_per_node: numbers of tasks, in the order of ``hosts``.
        node_id: index of this node in ``hosts``.
        rank: number of this task in the step. With one task per node it is ``node_id``, except with ``-m arbitrary``.
        reserved_ports: ports that ``srun --resv-ports`` reserved on all nodes of the step; usually empty.
    """

    job_id: str
    step_id: str
    requeue_count: int
    hosts: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    node_id: int
    rank: int
    local_rank: int
    reserved_ports: tuple[int, ...]


def read_job(environ: Mapping[str, str], *, is_first: bool) -> SlurmJob | None:
    """The SLURM job that contains this process; None outside of SLURM. Invalid numbers count as 0.

    ``is_first``: this is the first launcher of the run, or the only one.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    number = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")
    count = environ.get("SLURM_RESTART_COUNT", "")
    requeue_count = int(count) if count.isdecimal() else 0
    return SlurmJob(number, requeue_count, requests_requeue=is_first) if number else None


def read_step(environ: Mapping[str, str]) -> Step | None:
    """The step of this process; None outside of a step, or if the variables belong to a step that has ended.

    Raises:
        UsageError: the variables are invalid or contradict each other.
    """
    environ = {name: text for name, text in environ.items() if text}
    step_id = environ.get("SLURM_STEP_ID", "")
    # slurmstepd sets both for every task; one of them may have been lost.
    is_task = "SLURM_PROCID" in environ or "SLURMD_NODENAME" in environ
    if not ("SLURM_STEP_NODELIST" in environ and is_task and _is_srun_step(step_id)):
        return None
    hosts = parse_node_list(environ["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST")
    # sbatch copies its environment: a batch script can have the variables of a step that has ended. slurmstepd sets
    # SLURMD_NODENAME for every task and every batch script, so on a compute node it is always current.
    if environ.get("SLURMD_NODENAME", hosts[0]) not in hosts:
        return None
    environ = _completed(environ, hosts)
    step = Step(
        job_id=_text(environ, "SLURM_JOB_ID"),
        step_id=step_id,
        requeue_count=_requeue_count(environ),
        hosts=hosts,
        tasks_per_node=parse_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE"),
        node_id=_number(environ, "SLURM_NODEID"),
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        reserved_ports=_reserved_ports(environ.get("SLURM_STEP_RESV_PORTS", "")),
    )
    _check_consistent(step, _number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_STEP_NUM_TASKS"))
    return step


def _completed(environ: Mapping[str, str], hosts: tuple[str, ...]) -> dict[str, str]:
    """``environ`` with those variables of the step that it has lost, and that follow from the others."""
    found, nodes, tasks = dict(environ), len(hosts), environ.get("SLURM_STEP_NUM_TASKS")
    found.setdefault("SLURM_STEP_NUM_NODES", str(nodes))
    if nodes == 1 or "SLURMD_NODENAME" in found:
        found.setdefault("SLURM_NODEID", str(hosts.index(found.get("SLURMD_NODENAME", hosts[0]))))
    if tasks and (nodes == 1 or tasks == str(nodes)):
        found.setdefault("SLURM_STEP_TASKS_PER_NODE", tasks if nodes == 1 else f"1(x{nodes})")
    if "SLURM_STEP_TASKS_PER_NODE" in found:
        counts = parse_counts(found["SLURM_STEP_TASKS_PER_NODE"], "SLURM_STEP_TASKS_PER_NODE")
        found.setdefault("SLURM_STEP_NUM_TASKS", str(sum(counts)))
        found = _implied_by_counts(found, counts) | found
    return found


def _implied_by_counts(environ: Mapping[str, str], tasks_per_node: tuple[int, ...]) -> dict[str, str]:
    if tasks_per_node == (1,):
        return {"SLURM_JOB_ID": "unknown", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    if max(tasks_per_node) == 1:
        rank = environ.get("SLURM_PROCID") or environ.get("SLURM_NODEID", "")
        return {"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"}
    rank = environ.get("SLURM_PROCID") or environ.get("SLURM_LOCALID", "")
    return {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} if len(tasks_per_node) == 1 else {}


def _is_srun_step(step_id: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,10}", step_id)) and int(step_id) < _FIRST_SPECIAL_STEP


def _check_consistent(step: Step, nodes: int, tasks: int) -> None:
    per_node = step.tasks_per_node
    agree = (
        len(step.hosts) == len(per_node) == nodes > step.node_id
        and sum(per_node) == tasks > step.rank
        and per_node[step.node_id] > step.local_rank
    )
    if not agree:
        raise UsageError(
            f"SLURM_STEP_NODELIST names {len(step.hosts)} nodes, SLURM_STEP_NUM_NODES is {nodes}, "
            f"SLURM_STEP_NUM_TASKS {tasks}, SLURM_STEP_TASKS_PER_NODE {quote(','.join(map(str, per_node)), 40)}, "
            f"SLURM_NODEID {step.node_id}, SLURM_PROCID {step.rank}, SLURM_LOCALID {step.local_rank}: "
            "they contradict each other",
            f"One of them belongs to another step or job. {IGNORE_HINT}",
        )


def read_allocation(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes of the job, as its batch script or salloc's shell sees them; empty outside of SLURM.

    Of a heterogeneous job: one component. Call ``read_step`` first: a step also has an allocation.

    Raises:
        UsageError: the list of nodes cannot be read, or this is a step of several nodes that has lost its own list.
    """
    if not (environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST")):
        return ()
    hosts = parse_node_list(environ["SLURM_JOB_NODELIST"], "SLURM_JOB_NODELIST")
    # Without it each task of a step would start all nodes of the job.
    if len(hosts) > 1 and _is_srun_step(environ.get("SLURM_STEP_ID", "")) and not environ.get("SLURM_STEP_NODELIST"):
        raise UsageError("SLURM_STEP_ID is set and SLURM_STEP_NODELIST is not", f"srun sets both. {IGNORE_HINT}")
    return hosts


def parse_node_list(text: str, source: str = "the node list") -> tuple[str, ...]:
    """The names in a SLURM node list like ``n[01-03,7],login``, in the order of the list.

    Raises:
        UsageError: not a list of names; the message begins with ``source``.
    """
    names: list[str] = []
    for pattern in re.split(r",(?![^\[]*\])", text.strip()):
        if not re.fullmatch(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+", pattern) or pattern.startswith(("-", ".")):
            hint = f"A list is like n[01-03,7],login. {IGNORE_HINT}"
            raise UsageError(f"{source}={quote(text)}: not a SLURM node list", hint)
        try:
            names += expand(pattern)
        except UsageError as error:
            raise UsageError(f"{source}={quote(text)}: {error.message}", IGNORE_HINT) from None
        if len(names) > MAX_HOSTS:
            raise UsageError(f"{source}={quote(text)}: means more than {MAX_HOSTS:,} hosts", IGNORE_HINT)
    return tuple(names)


def parse_counts(text: str, source: str = "the counts") -> tuple[int, ...]:
    """The counts of SLURM's short form: ``8(x3),4`` is 8, 8, 8, 4.

    Raises:
        UsageError: any other text, a count of 0, or too many counts; the message begins with ``source``.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not (count and times and len(counts) + times <= MAX_HOSTS):
            raise UsageError(f"{source}={quote(text)}: not a list of counts like 8(x3),4", IGNORE_HINT)
        counts += [count] * times
    return tuple(counts)


def of_step(environ: Mapping[str, str]) -> SchedulerInfo | None:
    """This launcher is a task of a step that srun started."""
    step = read_step(environ)
    if step is None:
        return None
    nodes, per_node = len(step.hosts), step.tasks_per_node
    token = f"slurm-{step.job_id}.{step.step_id}.{step.requeue_count}"
    where = (
        f"SLURM job {step.job_id}, step {step.step_id}: node {step.node_id} of {nodes} ({quote(fold(step.hosts), 60)})"
    )
    task = ScheduledTask(step.rank, step.local_rank, sum(per_node), per_node[step.node_id], step.node_id, per_node)
    is_task, cpus = max(per_node) > 1, environ.get("SLURM_CPUS_ON_NODE", "")
    return SchedulerInfo(
        name="SLURM",
        kind="task" if is_task else "node",
        description=f"{where}, rank {step.rank} of {sum(per_node)}" if is_task else where,
        index=step.rank,
        launchers=sum(per_node),
        first_host=LOOPBACK if nodes == 1 else step.hosts[0],
        ports=(*step.reserved_ports[:8], *candidate_ports(token))[:8],
        token=token,
        is_server=step.node_id == step.local_rank == 0,
        task=task if is_task else None,
        warnings=tuple(lint(environ, step)),
        cpus=None if is_task or not cpus.isdecimal() else int(cpus),
        user_variables=(),
        advice=_SRUN,
    )


def of_allocation(environ: Mapping[str, str]) -> SchedulerInfo | None:
    """The shell or script of a job, outside of its steps: this launcher starts all nodes, through srun."""
    hosts = read_allocation(environ)
    if not hosts:
        return None
    job = f"SLURM job {environ['SLURM_JOB_ID']}"
    return SchedulerInfo(
        name="SLURM",
        kind="allocation",
        transport="srun",
        description=f"{job}: {plural(len(hosts), 'node')} ({quote(fold(hosts), 60)}), not in a step of srun",
        is_server=False,
        find_hosts=lambda: tuple(map(Host, hosts)),
        this_host=environ.get("SLURMD_NODENAME"),
        warnings=tuple(lint(environ, None)),
        endpoint_warning=_OUTSIDE_SRUN if len(hosts) > 1 else "",
        user_variables=(),
        advice=_SRUN,
    )


def lint(environ: Mapping[str, str], step: Step | None) -> Iterator[str]:
    """Probable mistakes in SLURM's variables, one sentence each."""
    if step is None:
        binding = environ.get("SLURM_CPU_BIND", "")
        # SLURM does not set the variable in a batch script or in salloc's shell.
        if re.search(r"(map|mask)_", binding):
            yield (
                f"SLURM_CPU_BIND={quote(binding, 40)} belongs to the step that submitted this job, and every srun "
                "uses it as --cpu-bind: unset it before srun"
            )
        if environ.get("SLURM_HET_SIZE"):
            yield "without srun --het-group, a heterogeneous job uses only the nodes of its first component"
        return
    allocated = read_allocation(environ)
    if allocated and not set(step.hosts) <= set(allocated):
        yield "SLURM_STEP_NODELIST has nodes that SLURM_JOB_NODELIST lacks: one of the two belongs to another job"
    # With one task per node the ranks of a node are always contiguous.
    if step.rank != sum(step.tasks_per_node[: step.node_id]) + step.local_rank and max(step.tasks_per_node) > 1:
        yield "the ranks of a node are not contiguous, which many programs expect: srun --distribution=block"


def _reserved_ports(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    if not re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", text):
        raise UsageError(f"SLURM_STEP_RESV_PORTS={quote(text)}: not a list of ports like 12000-12003", IGNORE_HINT)
    ports = tuple(map(int, parse_node_list(f"[{text}]", "SLURM_STEP_RESV_PORTS")))
    return tuple(port for port in ports if 0 < port < 65536)


def _requeue_count(environ: Mapping[str, str]) -> int:
    # SLURM does not set the variable before the first requeue (before 26.05), nor with srun --export=NONE.
    return _number(environ, "SLURM_RESTART_COUNT") if environ.get("SLURM_RESTART_COUNT") else 0


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{name}={quote(text)}: must be a whole number", IGNORE_HINT)
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(f"SLURM_STEP_NODELIST is set and {name} is not", f"srun sets both. {IGNORE_HINT}")
    return environ[name]
