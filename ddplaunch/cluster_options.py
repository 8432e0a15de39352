"""What a scheduler that started ddplaunch says, as the options that a user would have had to give.

What the user says wins. Looks at this process besides the environment: how many CPUs it may use, its name, its stdin.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddplaunch import option_values as values
from ddplaunch.errors import UsageError
from ddplaunch.job import Job
from ddplaunch.task import Task

if TYPE_CHECKING:
    from ddplaunch.config import Meeting, Remote
    from ddplaunch.detected import Detected  # noqa: TC004

PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PALS_", "JSM_", "LSB_", "PBS_", "JOB_COMPLETION_INDEX")
"""How the variables begin that mark any scheduler. Without one, the modules that know them are not even loaded."""

_MEETS = ("rdzv_endpoint", "master_addr", "node_rank", "standalone")
"""Options that say which node this is, or where the nodes meet."""

_HOSTS = ("DDPLAUNCH_HOSTS", "DDPLAUNCH_HOSTFILE")
_CHOOSES = ("include", "exclude")


@dataclass(frozen=True)
class Start:
    """How a run is started, once options and scheduler were heard.

    Attributes:
        options: the user's, and in their place what the scheduler says where the user says nothing.
        environ: likewise.
        meets: the scheduler says where the nodes meet; ``at_its_place`` adds what no option can say.
        notices: what was detected and what is likely not meant, as ``LaunchConfig`` has them.
        by_srun: the nodes, which ``environ`` names then, are SLURM's.
        job: of SLURM, if this process is in one.
    """

    options: Mapping[str, Any]
    environ: Mapping[str, str]
    meets: Detected | None = None
    task: Task | None = None
    notices: tuple[tuple[int, str], ...] = ()
    by_srun: bool = False
    job: Job | None = None

    def reached(self, remote: Remote) -> Remote:
        """``remote`` for the nodes that SLURM has allocated."""
        return replace(remote, by_srun=True) if self.by_srun else remote

    def at_its_place(self, meeting: Meeting | None) -> Meeting | None:
        """``meeting`` with a token that no other run has, and the other ports that are agreed on."""
        if meeting is None or self.meets is None:
            return meeting
        return replace(meeting, token=self.meets.token or meeting.token, other_ports=self.meets.ports[1:])


def heard(options: Mapping[str, Any], environ: Mapping[str, str]) -> Start:
    """Ask the environment for a scheduler.

    Raises:
        UsageError: it cannot be read, or disagrees with what the user says.
    """
    requeue_on = values.parse_requeue_signals(options["requeue_on"])
    if options["cluster"] == "auto" and not any(name.startswith(PREFIXES) for name in environ):
        return _in_job(Start(options, environ), None, requeue_on)
    from ddplaunch import cluster

    is_given = _is_given(options, environ)
    try:
        found = cluster.detect(environ, options["cluster"])
    except UsageError:
        if not (is_given and options["cluster"] == "auto"):
            raise
        found = None
    return _in_job(_start(found, options, environ, is_given), found, requeue_on)


def _in_job(start: Start, found: Detected | None, requeue_on: tuple[str, ...]) -> Start:
    """``start`` with SLURM's job, whatever in that job has started ddplaunch."""
    job = None
    if "SLURM_JOB_ID" in start.environ and start.options["cluster"] != "none":
        from ddplaunch import slurm

        job = slurm.read_job(start.environ)
    if job is None:
        if requeue_on:
            hint = "Leave it out, or start the job with sbatch, and without `--cluster none`."
            raise UsageError(f"--requeue-on {start.options['requeue_on']}: this is not a job of SLURM", hint)
        return start
    is_first = not (found and found.index)
    said = ((0, f"SLURM restart {job.restarts} of this job ({job.id})"),) if job.restarts and is_first else ()
    job = replace(job, requeue_on=requeue_on, asks=bool(requeue_on) and is_first)
    return replace(start, job=job, notices=(*start.notices, *said))


def _start(found: Detected | None, options: Mapping[str, Any], environ: Mapping[str, str], is_given: bool) -> Start:
    if found is None:
        return Start(options, environ)
    if is_given:
        from ddplaunch import cluster_checks

        warnings = cluster_checks.lint(found, environ, meets_itself=any(options[name] for name in _MEETS))
        said = f"{found.description}; not asked, since options say how to start"
        return Start(options, environ, notices=_notices(said, warnings if found.kind == "allocation" else ()))
    if found.kind in ("hosts", "allocation"):
        return _with_hosts(found, options, environ)
    if any(options[name] is not None for name in _CHOOSES):
        return Start(options, environ)
    return _per_node(found, options, environ)


def _is_given(options: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """The user says which nodes there are, or where they meet."""
    named = any(options[name] is not None for name in ("hosts", "hostfile"))
    inherited = any(environ.get(name) for name in _HOSTS)
    return bool(named or inherited or options["dry_run"] or any(options[name] for name in _MEETS))


def _with_hosts(found: Detected, options: Mapping[str, Any], environ: Mapping[str, str]) -> Start:
    from ddplaunch.detected import read_hosts

    hosts = read_hosts(found)
    notices = _notices(found.description, found.warnings)
    if len(hosts) == 1 and (_is_here(hosts[0].name) or environ.get("SLURMD_NODENAME") == hosts[0].name):
        return Start(options, environ, notices=notices)
    named = {**environ, _HOSTS[0]: ",".join(map(str, hosts))}
    return Start(options, named, notices=notices, by_srun=found.kind == "allocation")


def _per_node(found: Detected, options: Mapping[str, Any], environ: Mapping[str, str]) -> Start:
    from ddplaunch import cluster_checks

    nproc = values.parse_nproc(options["nproc_per_node"])
    nnodes = None if options["nnodes"] is None else values.parse_nnodes(options["nnodes"])
    cluster_checks.check_counts(found, nproc, nnodes)
    if found.task and options["numa_binding"]:
        hint = f"{found.name} binds its tasks itself, or start one task per node."
        raise UsageError(f"--numa-binding: {found.name} started a task for every worker", hint)
    workers = 1 if found.task else nproc if isinstance(nproc, int) else None
    cpus = len(os.sched_getaffinity(0))
    warnings = cluster_checks.lint(found, environ, workers=workers, cpus=cpus, terminal=_is_terminal())
    notices = _notices(found.description, () if found.index else warnings)
    told = {**options, "nproc_per_node": "1"} if found.task else options
    agents = found.agents or (nnodes[1] if nnodes else 1)
    if agents == 1:
        return Start(told, environ, task=found.task, notices=notices)
    found = replace(found, agents=agents, ports=_ports(found, options))
    error = cluster_checks.needs_endpoint(found)
    if error:
        raise error
    return Start({**told, **_as_options(found, options)}, environ, found, found.task, notices)


def _as_options(found: Detected, options: Mapping[str, Any]) -> dict[str, Any]:
    """Torchrun's own words for where the nodes meet and which of them this is."""
    host = found.first_host or ""
    conf = f"is_host={'true' if found.serves else 'false'}"
    return {
        "nnodes": str(found.agents) if found.task or options["nnodes"] is None else options["nnodes"],
        "node_rank": None if found.index is None else str(found.index),
        "rdzv_backend": options["rdzv_backend"].replace("static", "c10d"),
        "rdzv_endpoint": f"{f'[{host}]' if ':' in host else host}:{found.ports[0]}",
        "rdzv_conf": ",".join(filter(None, (conf, options["rdzv_conf"]))),
        "rdzv_id": found.token if options["rdzv_id"] in (None, "none") else options["rdzv_id"],
    }


def _ports(found: Detected, options: Mapping[str, Any]) -> tuple[int, ...]:
    """The one that the user fixes, else all that are agreed on."""
    if options["master_port"] is None:
        return found.ports
    return (values.parse_endpoint(f"host:{options['master_port']}", "--master-port")[1] or 0,)


def _notices(description: str, warnings: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return ((1, description), *((0, f"warning: {text}") for text in warnings))


def _is_here(name: str) -> bool:
    return name.split(".")[0] == socket.gethostname().split(".")[0]


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
