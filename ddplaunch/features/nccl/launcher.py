"""Says which network NCCL has chosen, once all ranks have told it. Runs in the launcher.

Output is read in the threads that read the agents' records; what is found is shown by the main thread. It sees the
output that reaches the console: not that of ranks that the user has filtered out, or of NCCL_DEBUG_FILE.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.features.health.records import NodeHealth
from ddplaunch.features.nccl import log, speaks
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.protocol.output_runs import runs_of

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.transport.handle import WriteOutput

_MARKS = (b" NCCL INFO ", b" NCCL WARN ", b"NCCL version ")
_MAX_LINE = 1 << 12


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The watch, if NCCL tells its choices."""
    environ = {**os.environ, **dict(run.config.remote.environ)}
    is_wanted = not run.config.dry_run and (run.config.output.nccl_report or speaks(environ))
    return (NcclNetwork(run, hides=run.config.output.nccl_report),) if is_wanted else ()


class NcclNetwork(Watch):
    """Reads NCCL's lines of all ranks; with ``hides`` the console does not show them, but the log files have them."""

    def __init__(self, run: RunServices, *, hides: bool) -> None:
        self._run, self._hides = run, hides
        self._lock = threading.Lock()
        self._told: dict[int, log.RankNetwork] = {}
        self._attempt = -1
        self._ranks = 0
        self._ports: dict[str, str] = {}
        self._was_shown = False

    def on_nodes_ready(self, workers: Mapping[str, int]) -> None:
        """As ``Watch.on_nodes_ready``."""
        self._ranks = sum(workers.values())

    def on_event(self, index: int, event: object) -> None:
        """The active ports, from the reading of the health at the start."""
        if isinstance(event, NodeHealth):
            self._ports[self._run.nodes.all[index].host] = log.active(event.hardware.ports)

    def on_output(self, write: WriteOutput) -> WriteOutput:
        """As ``Watch.on_output``."""

        def read(header: Output, data: bytes) -> None:
            if not any(mark in data for mark in _MARKS):
                write(header, data)
                return
            for of_stream, run in runs_of(header, data):
                rest = b"".join(line for line in run.splitlines(keepends=True) if not self._read(of_stream, line))
                shown = rest if self._hides else run
                if shown or of_stream.lost_lines:
                    write(replace(of_stream, nbytes=len(shown)), shown)

        return read

    def _read(self, header: Output, line: bytes) -> bool:
        """Whether the line is one of NCCL's that tell what it does; a warning of NCCL is not."""
        if not any(mark in line for mark in _MARKS):
            return False
        with self._lock:
            if header.attempt > self._attempt:
                self._attempt, self._told = header.attempt, {}
            rank = self._told.setdefault(header.rank, log.RankNetwork(header.host))
            before = rank.network
            rank.read(line[:_MAX_LINE].decode(errors="replace").rstrip())
            is_news = not before and bool(rank.network)
        if is_news:
            self._run.post(self._show_if_all)
        return b" NCCL WARN " not in line

    def _show_if_all(self) -> None:
        with self._lock:
            told = {rank: each for rank, each in self._told.items() if each.network}
        if told and len(told) >= self._ranks and not self._was_shown:
            self._show(told)

    def _show(self, told: Mapping[int, log.RankNetwork]) -> None:
        self._was_shown = True
        text = log.summary(told)
        self._run.messages.show(text, Level.NORMAL, "nccl_network")
        for warning in log.warnings(told, self._ports):
            self._run.messages.show(f"warning: {warning}", Level.NORMAL)

    def on_run_ended(self, end: RunEnd) -> None:
        """If not all ranks have told it, what some have."""
        with self._lock:
            told = {rank: each for rank, each in self._told.items() if each.network}
        if self._was_shown:
            return
        if told:
            self._show(told)
        elif self._hides:
            self._run.messages.show("--nccl-report: no rank has told which network NCCL uses", Level.NORMAL)
