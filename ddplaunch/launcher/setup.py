"""Prepares a run from its LaunchConfig: run folder, console style, transport, and the AgentSpec of each node.

Runs in the launcher, and for all other commands. Starts no process; only ``create_run_folder`` and ``open_console``
write files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.cluster.hosts import Host, display_names
from ddplaunch.config import LINE_PREFIX, AgentConfig, LaunchConfig, RendezvousConfig, WorkerConfig
from ddplaunch.errors import LaunchError
from ddplaunch.launcher.display.console import Console
from ddplaunch.launcher.display.line_prefix import Style
from ddplaunch.protocol import wire
from ddplaunch.protocol.specs import AgentSpec, Program
from ddplaunch.rows import load
from ddplaunch.system.files import run_folder
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.transport import transports

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.transport.agent_process import AgentProcess
    from ddplaunch.transport.handle import Post, Transport, WriteOutput

_LOOPBACK = "127.0.0.1"
HEARTBEAT_MARGIN_S = 3.0
"""Seconds by which the coordinator counts a silent node as lost later than a launcher that leads all nodes.

The launcher has its pings (5 s: 4 to 6, since they are sent once a second), the coordinator has heartbeats (8 s: 7 to
9). The launcher replaces the node in the same rendezvous; what the coordinator notices first costs a new one.
"""

SLOW_START_S = 25.0
"""Additional seconds for the first answer of an agent, which may be loaded from a slow shared file system."""


def node_names(config: LaunchConfig) -> tuple[str, ...]:
    """Display names of the nodes whose agents this launcher starts, the spares last; each name is of one node."""
    if config.hosts:
        return display_names(config.hosts)
    if config.dry_run:
        return tuple(f"node{number}" for number in range(config.max_nodes))
    return (local_host_name(),)


def local_host_name() -> str:
    """This machine's display name."""
    return socket.gethostname().split(".")[0] or "localhost"


def rendezvous_settings(config: LaunchConfig, token: str) -> RendezvousConfig:
    """What all rendezvous of a run have in common where this launcher leads; ``Participants`` completes it for each."""
    return RendezvousConfig(
        token=token,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        node_index=None,
        server_addresses=(_LOOPBACK,) if config.dry_run else (),
        port=0,
        is_server=None,
        local_addr=None if config.dry_run else config.local_addr,
        interface=None if config.dry_run else config.interface,
        join_timeout_s=config.timeouts.join_timeout_s,
        last_call_timeout_s=0.0,
        silent_after_s=config.timeouts.lost_after_s + HEARTBEAT_MARGIN_S,
        secret=os.urandom(32).hex(),
    )


def create_run_folder(config: LaunchConfig, run_id: str) -> tuple[Path | None, str | None]:
    """Create the run's folder.

    Where each node has a launcher, the folder is this launcher's; the agent moves it into that of the run when the
    nodes have met.

    Returns the folder, None for a run without files, and a warning if it cannot be created.

    Raises:
        LaunchError: it cannot be created, and the workers call a function.
    """
    if not config.output.keeps_files:
        return None, None
    base = Path(config.output.log_dir).absolute() if config.output.log_dir else run_folder.default_base(os.environ)
    try:
        folder = run_folder.create(base, f"{run_id}.{local_host_name()}" if config.each_node_has_launcher else run_id)
    except OSError as error:
        warning = f"no logs are kept: {base}: {error.strerror}"
        if config.entry == "function":
            raise LaunchError(warning, "What a function returns is written to the run folder.") from None
        return None, warning
    return folder, None


def console_style(config: LaunchConfig, folder: Path | None, stdout_fd: int = 1) -> Style:
    """The style of the lines on the console, whose stdout is ``stdout_fd``."""
    nodes = len(node_names(config))
    colour = not os.environ.get("NO_COLOR")

    def log_hint(header: Output) -> str:
        node = f"/{header.host}" if nodes > 1 else ""
        node_dir = f"{header.host}:<run folder>" if not config.is_local else f"{folder}{node}"
        logs = f"{node_dir}/attempt_*/{header.local_rank}/{header.stream}.log"
        return logs if folder else "no log (none is kept)"

    return Style(
        role=config.workers.role,
        template=LINE_PREFIX if config.output.line_prefix is None else config.output.line_prefix,
        colour={"stdout": colour and os.isatty(stdout_fd), "stderr": colour and os.isatty(2)},
        log_hint=log_hint,
    )


def open_console(config: LaunchConfig, folder: Path | None, stdout_fd: int, *, is_detached: bool = False) -> Console:
    """The console of a run, which also writes console.log into the run folder; of a detached run it is that file.

    Raises:
        LaunchError: no room for its threads, or there is no file.
    """
    # The agent of a local run reports a full disk, since its logs are on it.
    reports_full_disk = not config.is_local
    style = console_style(config, folder, stdout_fd)
    try:
        if folder and is_detached:
            return Console.in_file(folder, style, reports_full_disk=reports_full_disk)
        console = Console(style, stdout_fd)
    except (OSError, RuntimeError) as error:  # "can't start new thread"
        raise LaunchError(f"the launcher cannot start: {error}", NO_ROOM_HINT) from None
    if folder:
        console.keep_log(folder, reports_full_disk=reports_full_disk)
    return console


def program(config: LaunchConfig) -> Program:
    """What the workers run."""
    python = config.python or (sys.executable if config.is_local and not config.remote.python else "")
    return Program(config.entry, config.script, config.script_args, python, config.text)


def agent_spec(
    config: LaunchConfig,
    run_id: str,
    index: int,
    host: str,
    *,
    node_dir: str | None,
    inherited_fds: Mapping[str, int] | None = None,
) -> AgentSpec:
    """The AgentSpec of node ``index``, whose display name is ``host``.

    ``inherited_fds`` are descriptors that its agent has inherited, by stream name.
    """
    workers_program = program(config)
    python = workers_program.python
    fds = inherited_fds or {}
    # With ``max_restarts``: the agent hands it to the coordinator, which decides about restarts.
    shared = {field.name: getattr(config, field.name) for field in fields(AgentConfig)}
    shared["master_addr"] = config.master_addr or config.local_addr
    if config.hosts:
        shared["workers"] = _workers_of_host(config.workers, config.hosts[index])
    return AgentSpec(
        **shared,
        run_id=run_id,
        host=host,
        program=workers_program,
        same_python=not python or shutil.which(python) == sys.executable,
        node_dir=node_dir,
        one_launcher_leads=config.one_launcher_leads,
        texts=features.texts(config),
        stdin_fd=fds.get("stdin"),
        stdout_fd=fds.get("stdout"),
        stderr_fd=fds.get("stderr"),
    )


def send_early(config: LaunchConfig, run_id: str, folder: Path | None, agent: AgentProcess) -> AgentProcess:
    """Send its AgentSpec to an agent of a keeper, which is ready before the launcher is; others get it later."""
    if not agent.is_ready:
        return agent
    spec = agent_spec_of_run(config, run_id, folder, node_names(config), 0, agent.inherited_fds)
    assert agent.process.stdin
    with contextlib.suppress(OSError):  # The channel will be found closed.
        agent.process.stdin.write(wire.encode(spec))
        agent.process.stdin.flush()
    return replace(agent, has_spec=True)


def agent_spec_of_run(
    config: LaunchConfig,
    run_id: str,
    folder: Path | None,
    hosts: tuple[str, ...],
    index: int,
    inherited_fds: Mapping[str, int],
) -> AgentSpec:
    """The AgentSpec of node ``index`` of ``hosts``, with its node folder.

    ``folder`` is the run's on this machine, None if no files are kept; an agent on another machine makes a folder with
    this name there.
    """
    if config.is_local:
        node_dir = folder / hosts[index] if folder and len(hosts) > 1 else folder
        path = str(node_dir) if node_dir else None
        return agent_spec(config, run_id, index, hosts[index], node_dir=path, inherited_fds=inherited_fds)
    spec = agent_spec(config, run_id, index, hosts[index], node_dir=None)
    return replace(spec, run_dir_name=folder.name if folder else run_id)


def _workers_of_host(workers: WorkerConfig, host: Host) -> WorkerConfig:
    """``workers`` with the number of workers and the devices that ``host`` has in the host list."""
    nproc = workers.nproc_per_node if host.slots is None else host.slots
    return replace(workers, nproc_per_node=nproc, gpus=host.devices or workers.gpus)


def transport_for(
    config: LaunchConfig,
    run_tag: str,
    output: WriteOutput,
    post: Post,
    early_agent: AgentProcess | None = None,
    stdout_fd: int = 1,
) -> Transport:
    """The Transport for the nodes of ``config``; its handles call ``output`` and ``post`` in other threads.

    ``run_tag`` must be unique to this run: a sweep kills all processes that carry it. ``early_agent`` is the agent of a
    single node, if it has been started already. A single worker inherits ``stdout_fd`` if it is a terminal.

    Raises:
        LaunchError: this machine allows too few open files for so many hosts.
    """
    transport: type[Transport] = config.begun or load(transports.row(config.transport).class_path)
    return transport(config, node_names(config), run_tag, output, post, early_agent, stdout_fd)
