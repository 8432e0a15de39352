"""Nodes that are this machine: the one of a local run, or the pretended ones of a dry run, each an agent of ours."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch import environ, errors, marked
from ddplaunch.errors import LaunchError
from ddplaunch.launcher import agent_process
from ddplaunch.launcher.failures import NO_ROOM_HINT
from ddplaunch.launcher.handles import FromNode, FromSweep, mark_of
from ddplaunch.launcher.line_watch import watched
from ddplaunch.launcher.local import LocalHandle
from ddplaunch.launcher.preparation import agent_spec, of_host
from ddplaunch.records import SweepRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.agent_process import AgentProcess
    from ddplaunch.launcher.console import Console
    from ddplaunch.model import AgentSpec


class LocalNodes:
    """Starts agents here. The first gets the user's stdin and, for a lone worker, the terminal."""

    is_remote = False

    def __init__(
        self,
        config: LaunchConfig,
        hosts: tuple[str, ...],
        run_id: str,
        mark: str,
        folder: Path | None,
        console: Console,
        post: Callable[[object], None],
        ahead: AgentProcess | None = None,
    ) -> None:
        """``mark`` is what a sweep looks for; it must be this run's alone. ``ahead``: the agent of a lone node."""
        self.hosts = hosts
        self._config = config
        self._run_id = run_id
        self._mark = mark
        self._folder = folder
        self._console = console
        self._post = post
        self._ahead = ahead
        self._fds: dict[int, Mapping[str, int]] = {}

    def start(self, index: int) -> LocalHandle:
        """Start an agent.

        Raises:
            LaunchError: this machine has no room for it, or not the folder it shall work in.
        """
        chdir = self._config.chdir
        if chdir and not os.path.isdir(chdir):
            raise LaunchError(f"--chdir {chdir}: no such folder on {self.hosts[index]}", "", errors.NODE_NOT_READY)
        post = lambda event: self._post(FromNode(index, event))  # noqa: E731
        output = watched(self._config.injections, self._console.output, post)
        try:
            mark = mark_of(self._mark, self.hosts, index)
            agent = self._ahead or agent_process.start_node(self._config, mark, is_first=index == 0)
            self._fds[index] = agent.fds
            return LocalHandle(agent, post, output)
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"the agent on {self.hosts[index]} cannot be started: {error}", NO_ROOM_HINT) from None

    def spec(self, index: int) -> AgentSpec:
        """What agent ``index``, which was started, must know."""
        folder = self._folder / self.hosts[index] if self._folder and len(self.hosts) > 1 else self._folder
        log_dir = str(folder) if folder else None
        spec = agent_spec(self._config, self._run_id, self.hosts[index], log_dir, self._fds[index])
        return of_host(spec, self._config.hosts[index]) if self._config.hosts else spec

    def sweep(self, index: int) -> LocalHandle | None:
        """Have a fresh agent end what carries the mark of a lost one."""
        try:
            agent = agent_process.start(os.environ)
            sweeper = LocalHandle(agent, partial(self._from_sweep, index), lambda _header, _data: None)
        except (OSError, RuntimeError):
            return None
        sweeper.send(SweepRun(mark_of(self._mark, self.hosts, index), (os.getpid(), os.getppid())))
        return sweeper

    def close(self) -> None:
        """Nothing is left to end."""

    def _from_sweep(self, index: int, event: object) -> None:
        self._post(FromSweep(index, event))


def signal_node(mark: str, hosts: tuple[str, ...], index: int, signum: int) -> int:
    """Send to every process of a pretended node, its agent's too. Returns to how many."""
    return len(marked.signal_all(f"{environ.RUN_ID}={mark_of(mark, hosts, index)}", signum))
