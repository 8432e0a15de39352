"""``--keep-warm`` in the launcher: the agent of a keeper in place of a new process, and what the agents leave.

Loaded before the rest of the launcher, and by each run: it imports what asks a keeper only where there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch.features.warm import keeper_files
from ddplaunch.system.files.script_file import working_folder
from ddplaunch.transport import agent_process

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.warm.keeper_client import KeptAgent
    from ddplaunch.transport.agent_process import AgentProcess


def is_waiting(environ: Mapping[str, str]) -> bool:
    """Whether a keeper may wait."""
    return keeper_files.exists(environ)


def offer(config: LaunchConfig, run_tag: str, stdout_fd: int, meanwhile: Callable[[], None]) -> AgentProcess | str:
    """The agent of a keeper, or why there is none."""
    if config.keep_warm_s == 0 or config.task or not (config.keep_warm_s or is_waiting(os.environ)):
        return ""
    if config.remote.python:  # What is compared with the keeper's is of this process.
        return "the agent has another Python than the launcher" if config.keep_warm_s else ""
    from ddplaunch.features.warm import keeper_client
    from ddplaunch.features.warm.records import FIRST_INHERITED

    path = keeper_client.found(is_wanted=config.keep_warm_s is not None)
    if isinstance(path, str):
        return path and f"{keeper_client.ANEW}: {path}"
    cwd = os.path.abspath(config.chdir) if config.chdir else working_folder()
    environ, argv = agent_process.environ(config, run_tag), agent_process.COMMAND
    request = keeper_client.takeover(environ, cwd, config.workers.preload, config.script_file, argv, config.keep_warm_s)
    fds = agent_process.inherited(config, stdout_fd)
    try:
        agent = keeper_client.take_over(path, request, environ, cwd, tuple(fds.values()), meanwhile)
    finally:
        for fd in fds.values():
            os.close(fd)
    if isinstance(agent, str):
        return agent and f"{keeper_client.ANEW}: {agent}"
    numbers = {name: FIRST_INHERITED + number for number, name in enumerate(fds)}
    return agent_process.AgentProcess(agent, numbers, keeper_client.TAKEN, is_ready=True)


def offer_here(start: Mapping[str, Any], facts: dict[str, Any]) -> KeptAgent | None:
    """As ``offer``, on another machine, in the process that is to become an agent; see ``remote_start``."""
    from ddplaunch.features.warm.keeper_client import take_over_here

    return take_over_here(start, facts)


def for_agent(config: LaunchConfig) -> str | None:
    """What each agent leaves for the next run, a KeeperSpec, encoded; None: nothing.

    Other machines do not see the end of this session, or of a scheduler's job.
    """
    from ddplaunch.features.schedulers import table as schedulers
    from ddplaunch.features.warm.records import KeeperSpec
    from ddplaunch.protocol import wire
    from ddplaunch.transport import transports

    keeps_warm = transports.row(config.transport).keeps_warm and not (config.dry_run or config.task)
    if config.is_local and config.remote.python:  # ``offer`` never asks for it.
        return None
    if not (config.keep_warm_s and keeps_warm) or (schedulers.jobs(os.environ) and not config.is_local):
        return None
    leader = os.getsid(0)
    # Where daemons have made the session, as those of SLURM do, its leader may have ended long ago.
    is_watched = config.is_local and leader != os.getpid() and os.path.exists(f"/proc/{leader}")
    record = KeeperSpec(
        seconds=config.keep_warm_s,
        watched=(leader,) if is_watched else (),
        preload=config.workers.preload,
        script=config.script_file,
    )
    return wire.encode(record).decode()
