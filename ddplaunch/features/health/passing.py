"""The hosts that pass the check of ``--check-first`` or ``--check``: the user is told, and they are kept in a file.

Runs in the launcher, or in the command.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import display_names
from ddplaunch.errors import Level, OptionError
from ddplaunch.features.health import findings
from ddplaunch.features.health.records import NodeHealth
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.system.files import kept_files
from ddplaunch.text import plural, quote
from ddplaunch.threads import start_work

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

OPTION = "--passing-hosts-file"
_WRITE_S = 10.0
"""For so long the end of a run waits for a file system that does not answer."""


class PassingHosts(Watch):
    """Says once that all nodes pass, and writes the file: then, or at the end of a run for which too few pass."""

    def __init__(self, run: RunServices) -> None:
        self._run, self._config = run, run.config
        self._passed: set[int] = set()
        self._is_told = False
        self._written: Callable[[float], str] | None = None

    def on_event(self, index: int, event: object) -> None:
        """The health of node ``index``."""
        if isinstance(event, NodeHealth) and not findings.refused(event.findings, self._config.health):
            self._passed.add(index)

    def run_due(self, now: float) -> float:
        """After each event: another node may have been left out, so that all of the others have passed."""
        participants = self._run.participants.indices
        if not self._is_told and self._passed and self._passed.issuperset(participants):
            self._is_told = True
            self._tell(participants)
            self._write()
        return NEVER

    def _tell(self, participants: Sequence[int]) -> None:
        host, nodes = self._run.nodes.all[participants[0]].host, len(participants)
        text = f"all {plural(nodes, 'node')} pass the check" if nodes > 1 else f"{host} passes the check"
        self._run.messages.show(text, Level.NORMAL)

    def on_loop_ended(self) -> None:
        """If not all have passed, the file has those that did."""
        if not self._is_told:
            self._write()

    def _write(self) -> None:
        path, hosts = self._config.passing_hosts_file, [self._run.nodes.all[index].host for index in self._passed]
        if path:
            self._written = start_work("passing hosts", lambda: written(path, self._config, hosts), "no answer")

    def finish(self, end: RunEnd) -> None:
        """Wait for the file, and say why it cannot be written."""
        if self._written and (problem := self._written(time.monotonic() + _WRITE_S)):
            self._run.messages.show(f"warning: {not_written(self._config, problem)}", Level.ALWAYS)
            self._run.messages.drain(end.result, end.is_interrupted)


def written(path: str, config: LaunchConfig, names: Collection[str]) -> str:
    """Write the hosts with these names as a hostfile, in the order of the run. Returns why it cannot; else empty."""
    try:
        kept_files.write_whole(path, "".join(f"{line}\n" for line in hostfile(config, names)), 0o644)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def hostfile(config: LaunchConfig, names: Collection[str]) -> Sequence[str]:
    """The lines of a hostfile with those hosts of the run that have one of these display names."""
    if not config.hosts:
        return sorted(names)
    found = zip(display_names(config.hosts), config.hosts, strict=True)
    return [f"{host}{f' slots={host.slots}' if host.slots else ''}" for name, host in found if name in names]


def not_written(config: LaunchConfig, problem: str) -> str:
    """For the user."""
    return f"{OPTION} {quote(config.passing_hosts_file or '')} cannot be written: {problem}"


def check_file(config: LaunchConfig) -> None:
    """Raises OptionError if the file cannot be written, as far as that can be known, or if no launcher knows all."""
    if not config.passing_hosts_file:
        return
    path = os.path.abspath(config.passing_hosts_file)
    if config.each_node_has_launcher or config.task:
        raise OptionError(OPTION, path, "one launcher must start agents on all nodes", "Name them with --hosts.")
    kept_files.check_can_write(OPTION, path)
