"""Which values and combinations of a LaunchConfig cannot be meant. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddplaunch.config import MAX_SHUTDOWN_TIMEOUT_S, MAX_WORKERS_PER_NODE, NO_LOGS
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

_MIN_LOST_AFTER_S = 3.0
"""Nodes are asked once a second; fewer lost answers mean nothing."""


def check(config: LaunchConfig) -> None:
    """Raises UsageError for what cannot be meant."""
    _check_counts(config)
    _check_combinations(config)


def _check_counts(config: LaunchConfig) -> None:
    nproc = config.nproc_per_node
    if isinstance(nproc, int) and not 1 <= nproc <= MAX_WORKERS_PER_NODE:
        raise UsageError(f"--nproc-per-node {nproc}: must be between 1 and {MAX_WORKERS_PER_NODE}")
    if isinstance(nproc, str) and nproc not in ("auto", "cpu", "gpu", "xpu"):
        raise UsageError(
            f"--nproc-per-node {nproc}: must be a number or one of auto, cpu, gpu, xpu",
            "Without the option there is one worker per GPU, or one where there is no GPU.",
        )
    if config.is_led and not config.dry_run and not config.hosts:
        raise UsageError(
            f"--nnodes {config.max_nodes}: nothing says where the nodes meet",
            "Name the hosts with --hosts gpu1,gpu2 or --hostfile FILE, or start ddplaunch on every node, with "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, or with --master-addr HOST --node-rank N. "
            "--dry-run pretends the nodes here.",
        )
    if config.hosts and len(config.hosts) < config.min_nodes:
        named = "one host is named" if len(config.hosts) == 1 else f"{len(config.hosts)} hosts are named"
        raise UsageError(f"--nnodes {config.min_nodes}: {named}", "Name more hosts, or lower --nnodes.")
    if config.is_led and config.lost_after_s < _MIN_LOST_AFTER_S:
        raise UsageError(
            f"a node that is silent for {config.lost_after_s:g} s cannot be counted as lost",
            f"--rdzv-conf keep_alive_interval x keep_alive_max_attempt must be {_MIN_LOST_AFTER_S:g} or more.",
        )
    if not 0 <= config.shutdown_timeout_s <= MAX_SHUTDOWN_TIMEOUT_S:
        raise UsageError(f"--shutdown-timeout {config.shutdown_timeout_s:g}: must be 0 to {MAX_SHUTDOWN_TIMEOUT_S:g} s")
    if config.hang_timeout_s is not None and not 1 <= config.hang_timeout_s <= MAX_SHUTDOWN_TIMEOUT_S:
        raise UsageError(f"--hang-timeout {config.hang_timeout_s:g}: must be 1 to {MAX_SHUTDOWN_TIMEOUT_S:g} s")
    for option, number in (("--max-restarts", config.max_restarts), ("--gpus-per-proc", config.gpus_per_proc)):
        if number < 0:
            raise UsageError(f"{option} {number}: must not be negative")
    if config.master_port is not None and not 0 <= config.master_port <= 65535:
        raise UsageError(f"--master-port {config.master_port}: must be between 0 and 65535")


def _check_combinations(config: LaunchConfig) -> None:
    if not config.script:
        raise UsageError(
            "no script: give a script, or a module with -m, or a program with --no-python",
            "`ddplaunch --help` shows examples.",
        )
    if config.virtual_local_rank and config.gpus_per_proc:
        raise UsageError("--virtual-local-rank and --gpus-per-proc exclude each other: the first means one device each")
    if config.run_id is not None and not re.fullmatch(r"(?!\.)[\w.:@+-]{1,128}", config.run_id, re.ASCII):
        raise UsageError(
            f"--rdzv-id {config.run_id!r}: use letters, digits and . _ : @ + - (at most 128, no dot first)",
            "It names the log folder.",
        )
    if config.hang_timeout_s is not None and (config.task or (config.meeting and config.max_nodes > 1)):
        raise UsageError(
            "--hang-timeout: one launcher must hear of all nodes, and here each has its own",
            "Name all nodes with --hosts or --hostfile; in a SLURM job, start ddplaunch once, without srun before it.",
        )
    if config.injections and not config.dry_run:
        raise UsageError("--inject harms the job: it needs --dry-run", "A dry run rehearses the job here, on the CPU.")
    if config.log_dir == NO_LOGS and (config.duplicate_stdout_filters or config.duplicate_stderr_filters):
        raise UsageError("--duplicate-std*-filters need a log folder, and --log-dir is /dev/null")
