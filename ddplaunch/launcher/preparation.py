"""From a LaunchConfig to what a run starts with: its folder, how its console looks, what its agents are told."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch import environ, run_folder
from ddplaunch.config import NO_LOGS, LaunchConfig, Meeting, Rehearsal
from ddplaunch.launcher.line_style import Style
from ddplaunch.model import AgentSpec, Program
from ddplaunch.working_folder import working_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.hosts import Host
    from ddplaunch.launcher.remote import RemoteStart
    from ddplaunch.records import Output

_LOOPBACK = "127.0.0.1"
SLOW_START_S = 25.0
"""And so much longer before it is heard of at all: its agent may load from a cold shared file system."""


def hosts(config: LaunchConfig) -> tuple[str, ...]:
    """Display names of the nodes whose agents this launcher starts; the spares last."""
    if config.hosts:
        return tuple(host.name for host in config.hosts)
    if config.dry_run:
        return tuple(f"node{number}" for number in range(config.max_nodes))
    return (own_name(),)


def own_name() -> str:
    """This machine's display name."""
    return socket.gethostname().split(".")[0] or "localhost"


def meeting(config: LaunchConfig, token: str) -> Meeting:
    """What all meetings of a run have in common whose nodes this launcher starts."""
    return Meeting(
        token=token,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        node_rank=None,
        hosts=(_LOOPBACK,) if config.dry_run else (),
        port=0,
        serves=None,
        local_addr=None if config.dry_run else config.local_addr,
        interface=None if config.dry_run else config.interface,
        join_timeout_s=config.join_timeout_s,
        last_call_s=0.0,
        lost_after_s=config.lost_after_s,
    )


def make_folder(config: LaunchConfig, run_id: str) -> tuple[Path | None, str]:
    """The run's folder, or None and why there is none."""
    if config.log_dir == NO_LOGS:
        return None, ""
    base = Path(config.log_dir).absolute() if config.log_dir else run_folder.default_base(os.environ)
    try:
        folder = run_folder.create(base, run_id)
    except OSError as error:
        return None, f"no logs are kept: {base}: {error.strerror}"
    if config.log_dir is None:
        run_folder.prune(base)
    return folder, ""


def logs_folder(config: LaunchConfig, folder: Path | None) -> Path | None:
    """Where the logs of other machines are to be brought; None where they are not, or are here anyway."""
    return folder if config.collect_logs and config.hosts and not config.dry_run else None


def style(config: LaunchConfig, folder: Path | None) -> Style:
    """How the lines of a run look."""
    nodes = len(hosts(config))
    colour = not os.environ.get("NO_COLOR")

    def log_hint(header: Output) -> str:
        node = f"/{header.host}" if nodes > 1 else ""
        where = f"{header.host}:<run folder>" if config.hosts and not config.dry_run else f"{folder}{node}"
        logs = f"{where}/attempt_*/{header.local_rank}/{header.stream}.log"
        return logs if folder else "no log (none is kept)"

    return Style(
        role=config.role,
        template="[${host}:${rank}] " if config.line_prefix is None else config.line_prefix,
        colour={"stdout": colour and os.isatty(1), "stderr": colour and os.isatty(2)},
        log_hint=log_hint,
    )


def agent_spec(config: LaunchConfig, run_id: str, host: str, log_dir: str | None, fds: Mapping[str, int]) -> AgentSpec:
    """What the agent on ``host`` must know; ``fds`` are descriptors that it inherits, by the streams' names."""
    is_local = config.dry_run or not config.hosts
    python = config.python or (sys.executable if is_local else "")
    return AgentSpec(
        run_id=run_id,
        host=host,
        program=Program(config.entry, config.script, config.script_args, python),
        python_is_ours=not python or shutil.which(python) == sys.executable,
        nproc_per_node=config.nproc_per_node,
        gpus=config.gpus,
        gpus_per_proc=config.gpus_per_proc,
        virtual_local_rank=config.virtual_local_rank,
        pass_local_rank=config.pass_local_rank,
        role=config.role,
        max_restarts=config.max_restarts,
        start_method=config.start_method,
        preload=config.preload,
        numa_binding=config.numa_binding,
        master_addr=config.master_addr or config.local_addr,
        master_port=config.master_port,
        shutdown_timeout_s=config.shutdown_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
        log_dir=log_dir,
        redirects=config.redirects,
        tee=config.tee,
        show_ranks=config.show_ranks,
        show_local_ranks=config.show_local_ranks,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        meeting=config.meeting,
        is_led=config.is_led,
        rehearsal=Rehearsal(compiles=config.rehearse_compile) if config.dry_run else None,
        task=config.task,
        stdin_fd=fds.get("stdin"),
        stdout_fd=fds.get("stdout"),
        stderr_fd=fds.get("stderr"),
    )


def of_host(spec: AgentSpec, host: Host) -> AgentSpec:
    """``spec`` with the number of workers and the devices that the user gave for ``host``."""
    nproc = spec.nproc_per_node if host.slots is None else host.slots
    return replace(spec, nproc_per_node=nproc, gpus=host.devices or spec.gpus)


def remote_start(config: LaunchConfig, mark: str) -> RemoteStart:
    """What starts an agent on another machine; ``mark`` is what the processes of that node carry."""
    from ddplaunch.launcher.remote import RemoteStart

    return RemoteStart(
        python=config.remote.python or sys.executable,
        cwd=config.chdir or working_folder(),
        env={**dict(config.remote.environ), environ.RUN_ID: mark},
        setup=config.remote.setup,
        script=config.script if config.entry == "script" else "",
    )
