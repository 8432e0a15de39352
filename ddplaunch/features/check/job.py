"""Runs a module of ddplaunch in a real job with one worker per node, and returns what its workers have printed.

Runs in the launcher, for ``--check``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import display_names
from ddplaunch.config import LINE_PREFIX, NO_LOGS, LaunchConfig, OutputConfig, Streams, WorkerConfig
from ddplaunch.errors import LaunchError
from ddplaunch.timeouts import TimeoutConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.protocol.results import RunResult


def job(config: LaunchConfig, names: Sequence[str], module: str) -> LaunchConfig:
    """A job with one worker on each of these nodes, in their order."""
    named = zip(display_names(config.hosts), config.hosts, strict=True)
    hosts = tuple(replace(host, slots=None) for name, host in named if name in names)
    return LaunchConfig(
        script=module,
        entry="module",
        min_nodes=len(names),
        max_nodes=len(names),
        workers=WorkerConfig(nproc_per_node=1, gpus=config.workers.gpus),
        hosts=hosts,
        # The table shows addresses without a name; torch would warn about them for every worker.
        remote=replace(config.remote, environ=(("TORCH_CPP_LOG_LEVEL", "ERROR"), *config.remote.environ)),
        chdir=config.chdir,
        interface=config.interface,
        local_addr=config.local_addr,
        timeouts=TimeoutConfig(shutdown_timeout_s=min(config.timeouts.shutdown_timeout_s, 5.0), hang_report_s=None),
        signals=config.signals,
        health="off",  # The check itself has looked, and a sick node is to be measured too.
        output=OutputConfig(
            log_dir=NO_LOGS,
            redirects=Streams(2),
            line_prefix=LINE_PREFIX,
            verbosity=max(-1, config.output.verbosity - 1),
        ),
    )


def run(config: LaunchConfig, prefix: bytes) -> tuple[RunResult, list[bytes]]:
    """Run ``config``; its result, and the rest of each line of output after ``prefix``.

    Raises:
        LaunchError: the user stopped it.
    """
    from ddplaunch.launcher.launch import launch

    with os.fdopen(os.memfd_create("ddplaunch-check"), "rb") as file:  # A container may have no writable folder.
        result = launch(config, file.fileno())
        file.seek(0)
        lines = [line.partition(prefix)[2] for line in file.read().splitlines() if prefix in line]
    if result.outcome == "stopped":
        raise LaunchError("stopped", "", result.exit_code)
    return result, lines
