"""``--check``: whether the nodes of a command are ready for a job; ``--check-first``: a job runs only on such nodes.

Runs in the process that the user started. Starts agents and short test processes on the nodes, and no worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def rows() -> tuple[object, ...]:
    """``--check``."""
    from typing import get_args

    from ddplaunch.config import CheckFirst
    from ddplaunch.rows import REAL_RUN, Command, Option, flag

    return (
        flag(
            "--check",
            "Test this machine, or --hosts: versions, GPUs, health, limits, network speed; run no script.",
            short="test this machine or the hosts; run no script",
            heading="Before a run",
        ),
        flag(
            "--deep",
            "With --check: measure each GPU (matrix product, memory, transfers to the others) and name the slow ones.",
            of="--check",
        ),
        Option(
            "--check-first",
            "HOW",
            "Run only on nodes that pass the check, spares replace others. quick: each node checks itself while torch "
            "is imported; deep: as --check --deep, before the start.",
            choices=get_args(CheckFirst),
            sets="check_first",
            only=(REAL_RUN,),
            heading="Before a run",
        ),
        Option(
            "--passing-hosts-file",
            "FILE",
            "With --check-first or --check: write the hosts that pass the check into FILE, as a hostfile.",
            sets="passing_hosts_file",
            completes="file",
            heading="Before a run",
        ),
        Command("--check", run="ddplaunch.features.check.check:check", takes_script=True),
    )


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """Raises UsageError for a check that this run cannot have, or a file that cannot be written."""
    from ddplaunch.errors import UsageError
    from ddplaunch.features.check import first
    from ddplaunch.features.health import passing

    if config.passing_hosts_file and not config.check_first:
        raise UsageError(f"{passing.OPTION} has an effect only with --check-first or --check", "", (passing.OPTION,))
    if config.check_first == "deep" and not config.dry_run:
        first.check_supported(config)
    passing.check_file(config)
    return config


def at_start(config: LaunchConfig) -> LaunchConfig:
    """With ``deep``, ``config`` with the hosts that pass: ``first.at_start``."""
    if config.check_first != "deep" or config.dry_run:
        return config
    from ddplaunch.features.check import first

    return first.at_start(config)
