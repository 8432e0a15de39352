"""Offers a run the agent of a keeper in place of a new process. Runs in the launcher, before it loads the rest."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ddplaunch.features.warm import keeper_files
from ddplaunch.system.files.run_folder import working_folder
from ddplaunch.transport import agent_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    from ddplaunch.features.warm import keeper_client
    from ddplaunch.features.warm.records import FIRST_INHERITED

    request = keeper_client.Request(
        environ=agent_process.environ(config, run_tag),
        cwd=os.path.abspath(config.chdir) if config.chdir else working_folder(),
        preload=config.workers.preload,
        script=config.script if config.entry == "script" and not config.text else "",
        argv=agent_process.COMMAND,
        seconds=config.keep_warm_s,
    )
    fds = agent_process.inherited(config, stdout_fd)
    try:
        outcome = keeper_client.take_over(request, tuple(fds.values()), meanwhile)
    finally:
        for fd in fds.values():
            os.close(fd)
    if outcome.agent is None:
        return outcome.reason and f"{keeper_client.ANEW}: {outcome.reason}"
    numbers = {name: FIRST_INHERITED + number for number, name in enumerate(fds)}
    return agent_process.AgentProcess(outcome.agent, numbers, keeper_client.TAKEN, is_ready=True)


def offer_here(start: Mapping[str, Any], facts: dict[str, Any]) -> KeptAgent | None:
    """As ``offer``, on another machine, in the process that is to become an agent; see ``transport.remote_start``."""
    from ddplaunch.features.warm.keeper_client import take_over_here

    return take_over_here(start, facts)
