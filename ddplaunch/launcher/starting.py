"""Which kind of nodes a run has, and who starts their agents."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.launcher import preparation
from ddplaunch.launcher.injector import Injector
from ddplaunch.launcher.local_nodes import LocalNodes, signal_node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.agent_process import AgentProcess
    from ddplaunch.launcher.console import Console
    from ddplaunch.launcher.handles import Starter
    from ddplaunch.launcher.heartbeats import Heartbeats


def starter_for(
    config: LaunchConfig,
    run_id: str,
    mark: str,
    folder: Path | None,
    console: Console,
    post: Callable[[object], None],
    ahead: AgentProcess | None = None,
) -> Starter:
    """Of agents on other machines where hosts are named, else here. ``mark`` must be this run's alone."""
    if config.dry_run or not config.hosts:
        return LocalNodes(config, preparation.hosts(config), run_id, mark, folder, console, post, ahead)
    if config.remote.by_srun:
        from ddplaunch.launcher.srun_nodes import SrunNodes

        return SrunNodes(config, run_id, mark, folder, console, post)
    from ddplaunch.launcher.ssh_nodes import SshNodes  # paramiko's users wait for it, nobody else.

    return SshNodes(config, run_id, mark, folder, console, post)


def injector_for(config: LaunchConfig, mark: str, starter: Starter, heartbeats: Heartbeats) -> Injector:
    """What makes the failures of a rehearsal happen to the nodes of ``starter``."""
    return Injector(config.injections, partial(signal_node, mark, starter.hosts), heartbeats)
