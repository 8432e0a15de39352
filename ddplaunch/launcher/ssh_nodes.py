"""Nodes on other machines, each an agent of ours over SSH."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.launcher.handles import FromNode, FromSweep, mark_of
from ddplaunch.launcher.preparation import agent_spec, of_host, remote_start
from ddplaunch.launcher.ssh import SshHandle
from ddplaunch.launcher.ssh_config import SshSettings
from ddplaunch.launcher.ssh_connections import Connections, make_room
from ddplaunch.records import SweepRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddplaunch.config import LaunchConfig, Remote
    from ddplaunch.launcher.console import Console
    from ddplaunch.launcher.remote import RemoteStart
    from ddplaunch.model import AgentSpec


def connections(remote: Remote, hosts: int) -> Connections:
    """What connections to so many hosts have in common.

    Raises:
        LaunchError: this machine allows too few open files for them.
    """
    settings = SshSettings(
        user=remote.user,
        port=remote.port,
        identity=remote.identity,
        config=remote.config,
        accept_new=remote.accept_new,
        connect_timeout_s=remote.connect_timeout_s,
    )
    make_room(hosts, settings.width)
    return Connections(settings)


class SshNodes:
    """Connects to hosts and starts agents there; any of them may turn out to be unusable."""

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
        """``mark`` is what a sweep looks for; it must be this run's alone.

        Raises:
            LaunchError: this machine allows too few open files for so many hosts.
        """
        self.hosts = tuple(host.name for host in config.hosts)
        self._config = config
        self._run_id = run_id
        self._mark = mark
        self._folder = folder.name if folder else run_id
        self._console = console
        self._post = post
        self._connections = connections(config.remote, len(config.hosts))

    def start(self, index: int) -> SshHandle:
        """Begin to connect; AgentConnected or HostFailure is posted."""
        post = lambda event: self._post(FromNode(index, event))  # noqa: E731
        return SshHandle(self._config.hosts[index], self._start(index), self._connections, post, self._console.output)

    def spec(self, index: int) -> AgentSpec:
        """What agent ``index`` must know: a host's own number of workers and devices, where the user gave some."""
        host = self._config.hosts[index]
        spec = agent_spec(self._config, self._run_id, host.name, self._config.log_dir, {})
        return replace(of_host(spec, host), own_folder=self._folder, sends_logs=self._config.collect_logs)

    def sweep(self, index: int) -> SshHandle:
        """Ask the node, over a new connection, to end what carries the mark of this run."""
        start = replace(self._start(index), needs_torch=False, script="")
        post = partial(self._from_sweep, index)
        sweeper = SshHandle(self._config.hosts[index], start, self._connections, post, lambda _header, _data: None)
        sweeper.send(SweepRun(mark_of(self._mark, self.hosts, index), ()))
        return sweeper

    def close(self) -> None:
        """End what connections have in common."""
        self._connections.close()

    def _from_sweep(self, index: int, event: object) -> None:
        self._post(FromSweep(index, event))

    def _start(self, index: int) -> RemoteStart:
        return remote_start(self._config, mark_of(self._mark, self.hosts, index))
