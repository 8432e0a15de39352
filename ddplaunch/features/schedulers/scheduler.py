"""Completes the options from the environment of the scheduler that started ddplaunch.

Runs in the launcher. The user's options take precedence. Besides the environment, reads the allowed CPUs and the host
name of this machine, and whether stdin is a terminal.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddplaunch.cli import values
from ddplaunch.cli.build_config import CompletedOptions
from ddplaunch.cli.host_options import HOST_OPTIONS
from ddplaunch.cluster.hosts import HOSTFILE_VARIABLE, HOSTS_VARIABLE, Host
from ddplaunch.errors import StartNotice, UsageError
from ddplaunch.features.schedulers import table
from ddplaunch.rows import load

if TYPE_CHECKING:
    from ddplaunch.features.schedulers.info import SchedulerInfo

_ENDPOINT_OPTIONS = ("rdzv_endpoint", "master_addr", "node_rank", "standalone")
"""Options that give the node rank or the rendezvous endpoint."""


def completed(options: Mapping[str, Any], environ: Mapping[str, str]) -> CompletedOptions:
    """Detect a scheduler in ``environ`` and complete the options from it.

    Raises:
        UsageError: the variables cannot be read, or contradict the options.
    """
    selects_nodes = _names_hosts_or_endpoint(options, environ)
    scheduler = _detect(options, environ, selects_nodes)
    found = _complete(scheduler, options, environ, selects_nodes) if scheduler else CompletedOptions(options)
    return _with_job(found, scheduler, environ)


def _names_hosts_or_endpoint(options: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether the user names hosts or an endpoint, so that the scheduler's hosts and endpoint are not used."""
    hosts = any(options[name] is not None for name in ("hosts", "hostfile"))
    inherited = any(environ.get(name) for name in (HOSTS_VARIABLE, HOSTFILE_VARIABLE))
    return bool(hosts or inherited or options["dry_run"] or any(options[name] for name in _ENDPOINT_OPTIONS))


def is_first_task(environ: Mapping[str, str]) -> bool:
    """Whether no scheduler has started this process as a second or later one of one command."""
    return all(environ.get(name, "0") == "0" for row in table.TABLE for name in row.ranks)


def _detect(options: Mapping[str, Any], environ: Mapping[str, str], selects_nodes: bool) -> SchedulerInfo | None:
    try:
        return table.detect(environ, options["cluster"])
    except UsageError:
        if selects_nodes and options["cluster"] == "auto":
            return None
        raise


def transport_of_command(hosts: Collection[Host], options: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """As ``cli.build_config.transport_of_command``.

    Raises:
        UsageError: the scheduler's hostfile cannot be read.
    """
    scheduler = _detect(options, environ, selects_nodes=True) if hosts else None
    if scheduler is None or scheduler.transport == CompletedOptions.transport:
        return CompletedOptions.transport
    names = {host.name for host in scheduler.find_hosts()}
    is_inside = all(host.name in names and host.user is None and host.port is None for host in hosts)
    return scheduler.transport if is_inside else CompletedOptions.transport


def _with_job(found: CompletedOptions, scheduler: SchedulerInfo | None, environ: Mapping[str, str]) -> CompletedOptions:
    """Add the SLURM job that contains this process, whichever program in it started ddplaunch."""
    if found.options["cluster"] == "none":
        return found
    is_first = not (scheduler and scheduler.index)
    readers = (row.job_reader for row in table.jobs(environ) if row.job_reader)
    job = next((load(reader)(environ, is_first=is_first) for reader in readers), None)
    return replace(found, slurm_job=job)


def _complete(
    scheduler: SchedulerInfo, options: Mapping[str, Any], environ: Mapping[str, str], selects_nodes: bool
) -> CompletedOptions:
    if selects_nodes:
        from ddplaunch.features.schedulers import checks

        has_endpoint = any(options[name] for name in _ENDPOINT_OPTIONS)
        warnings = checks.lint(scheduler, environ, has_endpoint=has_endpoint)
        warnings = warnings if scheduler.kind == "allocation" else ()
        reason = "this is a dry run" if options["dry_run"] else "options or the environment select the nodes"
        text = f"{scheduler.description}; not used: {reason}"
        if rank := _own_rank(scheduler, options):
            options = {**options, "node_rank": str(rank)}
            warnings += (checks.own_rank_warning(scheduler),) if rank == 1 else ()
        return CompletedOptions(options, notices=_notices(text, warnings))
    if scheduler.kind == "allocation":
        return _with_hosts(scheduler, options)
    if any(options[name] is not None for name in HOST_OPTIONS):
        return CompletedOptions(options)  # They filter hosts, and none are named: their feature refuses them.
    return _with_endpoint(scheduler, options, environ)


def _own_rank(scheduler: SchedulerInfo, options: Mapping[str, Any]) -> int | None:
    """The scheduler's rank of this node, if the user gave ``--node-rank 0`` only because a shell has expanded it.

    The shell of a batch script expands $SLURM_NODEID to 0 for all nodes. None: the user's rank counts, since it is not
    0, the scheduler has rank 0 for this node as well, or this node has the address of the endpoint.
    """
    rank, endpoint = scheduler.index, options["rdzv_endpoint"] or options["master_addr"]
    if not (rank and options["node_rank"] == "0" and options["nnodes"] and endpoint):
        return None
    if (
        options["standalone"]
        or options["dry_run"]
        or scheduler.launchers not in (None, values.parse_nnodes(options["nnodes"])[1])
    ):
        return None
    from ddplaunch.system import network

    return None if network.is_local(values.parse_endpoint(endpoint, "--rdzv-endpoint")[0]) else rank


def _with_hosts(scheduler: SchedulerInfo, options: Mapping[str, Any]) -> CompletedOptions:
    """For one launcher that starts all nodes of the scheduler."""
    hosts = scheduler.find_hosts()
    notices = _notices(scheduler.description, scheduler.warnings)
    if len(hosts) == 1 and (_is_here(hosts[0].name) or scheduler.this_host == hosts[0].name):
        return CompletedOptions(options, notices=notices)
    return CompletedOptions(options, hosts=hosts, notices=notices, transport=scheduler.transport)


def _with_endpoint(
    scheduler: SchedulerInfo, options: Mapping[str, Any], environ: Mapping[str, str]
) -> CompletedOptions:
    """For one of several launchers, which the scheduler started on every node or for every worker."""
    from ddplaunch.features.schedulers import checks

    nproc = None if options["nproc_per_node"] is None else values.parse_nproc(options["nproc_per_node"])
    nnodes = None if options["nnodes"] is None else values.parse_nnodes(options["nnodes"])
    checks.check_counts(scheduler, nproc, nnodes)
    if scheduler.task and options.get("numa_binding") not in (None, "auto", "off"):
        hint = f"{scheduler.name} binds its tasks itself, or start one task per node."
        raise UsageError(f"--numa-binding: {scheduler.name} started a task for every worker", hint)
    workers = 1 if scheduler.task else nproc if isinstance(nproc, int) else None
    cpus = len(os.sched_getaffinity(0))
    warnings = checks.lint(scheduler, environ, workers=workers, cpus=cpus, terminal=_is_terminal())
    notices = _notices(scheduler.description, () if scheduler.index else warnings)
    if scheduler.task:
        options = {**options, "nproc_per_node": "1"}
    launchers = scheduler.launchers or (nnodes[1] if nnodes else 1)
    if launchers == 1:
        return CompletedOptions(options, task=scheduler.task, notices=notices)
    scheduler = replace(scheduler, launchers=launchers, ports=_ports(scheduler, options))
    if scheduler.find_endpoint:
        scheduler = scheduler.find_endpoint(scheduler)
    checks.check_endpoint(scheduler)
    options = {**options, **_endpoint_options(scheduler, options)}
    return CompletedOptions(options, rendezvous=_rendezvous(scheduler), task=scheduler.task, notices=notices)


def _endpoint_options(scheduler: SchedulerInfo, options: Mapping[str, Any]) -> dict[str, Any]:
    """The endpoint and this node's rank, as torchrun's options."""
    host = scheduler.first_host or ""
    conf = f"is_host={'true' if scheduler.is_server else 'false'}"
    return {
        "nnodes": str(scheduler.launchers) if scheduler.task or options["nnodes"] is None else options["nnodes"],
        "node_rank": None if scheduler.index is None else str(scheduler.index),
        "rdzv_backend": options["rdzv_backend"].replace("static", "c10d"),
        "rdzv_endpoint": f"{f'[{host}]' if ':' in host else host}:{scheduler.ports[0]}",
        "rdzv_conf": ",".join(filter(None, (conf, options["rdzv_conf"]))),
        "rdzv_id": scheduler.token if options["rdzv_id"] in (None, "none") else options["rdzv_id"],
    }


def _rendezvous(scheduler: SchedulerInfo) -> dict[str, Any]:
    """What no option of torchrun can say of the endpoint, as fields of RendezvousConfig."""
    found: dict[str, Any] = {"other_ports": scheduler.ports[1:]}
    if scheduler.other_addresses:
        found["server_addresses"] = (scheduler.first_host, *scheduler.other_addresses)
    return found | ({"token": scheduler.token} if scheduler.token else {})


def _ports(scheduler: SchedulerInfo, options: Mapping[str, Any]) -> tuple[int, ...]:
    """The port that the user gave, otherwise all ports of the scheduler's endpoint."""
    if options["master_port"] is None:
        return scheduler.ports
    return (values.parse_endpoint(f"host:{options['master_port']}", "--master-port")[1] or 0,)


def _notices(description: str, warnings: tuple[str, ...]) -> tuple[StartNotice, ...]:
    return (StartNotice("detail", description), *(StartNotice("warning", text) for text in warnings))


def _is_here(name: str) -> bool:
    return name.split(".")[0] == socket.gethostname().split(".")[0]


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
