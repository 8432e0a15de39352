"""Nodes of SLURM's allocation, each an agent of ours in a step of its own."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.launcher.handles import FromNode, FromSweep, mark_of
from ddplaunch.launcher.preparation import agent_spec, of_host, remote_start
from ddplaunch.launcher.srun import SrunHandle
from ddplaunch.records import SweepRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.console import Console
    from ddplaunch.launcher.remote import RemoteStart
    from ddplaunch.model import AgentSpec


class SrunNodes:
    """Starts agents through srun; any of them may turn out to be unusable."""

    is_remote = True

    def __init__(
        self,
        config: LaunchConfig,
        run_id: str,
        mark: str,
        folder: Path | None,
        console: Console,
        post: Callable[[object], None],
    ) -> None:
        """``mark`` is what a sweep looks for; it must be this run's alone."""
        self.hosts = tuple(host.name for host in config.hosts)
        self._config = config
        self._run_id = run_id
        self._mark = mark
        self._folder = folder.name if folder else run_id
        self._console = console
        self._post = post

    def start(self, index: int) -> SrunHandle:
        """Begin to start the agent; AgentConnected or HostFailure is posted.

        Raises:
            LaunchError: there is no srun here, or no room for it.
        """
        post = lambda event: self._post(FromNode(index, event))  # noqa: E731
        env = {**os.environ, **dict(self._config.remote.environ)}
        try:
            return SrunHandle(self.hosts[index], self._start(index), env, post, self._console.output)
        except OSError as error:
            raise LaunchError(
                f"srun cannot be run here: {error.strerror}",
                "It starts the agents on the nodes of SLURM's allocation. `--cluster none` runs on this machine only.",
                NODE_NOT_READY,
            ) from None

    def spec(self, index: int) -> AgentSpec:
        """What agent ``index`` must know."""
        host = self._config.hosts[index]
        spec = agent_spec(self._config, self._run_id, host.name, self._config.log_dir, {})
        return replace(of_host(spec, host), own_folder=self._folder, sends_logs=self._config.collect_logs)

    def sweep(self, index: int) -> SrunHandle | None:
        """Have a fresh agent end what carries the mark of a lost one."""
        start = replace(self._start(index), needs_torch=False, script="")
        post = partial(self._from_sweep, index)
        with contextlib.suppress(OSError):
            sweeper = SrunHandle(self.hosts[index], start, os.environ, post, lambda _header, _data: None)
            sweeper.send(SweepRun(mark_of(self._mark, self.hosts, index), ()))
            return sweeper
        return None

    def close(self) -> None:
        """Nothing is left to end."""

    def _from_sweep(self, index: int, event: object) -> None:
        self._post(FromSweep(index, event))

    def _start(self, index: int) -> RemoteStart:
        return remote_start(self._config, mark_of(self._mark, self.hosts, index))
