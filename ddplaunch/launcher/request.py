"""Request: what a command gets from the command line. Runs in the process that the user started; data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.late_dataclass import dataclass
from ddplaunch.timeouts import TimeoutConfig


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks a command for.

    Attributes:
        value: the value of the command's option; empty for a flag.
        options: the values of all options by name. Those of the command itself are parsed, as its row says.
        show: prints a result on stdout.
        report: prints a message on stderr, unless --quiet is given.
        hosts: the other machines, of a command that takes hosts.
        remote: how to connect to them.
        grace_s: --shutdown-timeout, of a command that takes hosts.
        configure: returns the configuration of a run with the user's options, and those that are given in their place.
    """

    value: Any
    options: Mapping[str, Any]
    show: Callable[[str], None]
    report: Callable[[str], None]
    configure: Callable[..., LaunchConfig]
    hosts: tuple[Host, ...] = ()
    remote: RemoteConfig = RemoteConfig()
    grace_s: float = TimeoutConfig.shutdown_timeout_s

    @property
    def log_dir(self) -> str | None:
        """--log-dir."""
        log_dir: str | None = self.options["log_dir"]
        return log_dir

    @property
    def is_verbose(self) -> bool:
        """--verbose."""
        return bool(self.options["verbose"])
