"""Hangs: a job in which nothing moves is noticed, explained, shown and ended; ``--stacks`` explains any job.

Agents sample their workers and report for how long they are quiet; the launcher has them examined, and explains who
waits for whom. A thread in each worker answers what torch knows of its collectives. What explains is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

EVENTS = {
    "quiet": "no rank has written output or called a collective since `t`; known 60 s later",
    "active": "the job is no longer quiet, after `s` seconds",
    "hang_reported": "nothing has moved for so long that the job seems to hang",
    "moves_again": "a job that seemed to hang moves again",
    "hang_aborted": "`--hang-timeout` or `--busy-timeout` ends the attempt",
}


def rows() -> tuple[object, ...]:
    """``--hang-timeout``, ``--busy-timeout``, ``--hang-report``, ``--stacks``."""
    from ddplaunch.rows import EXISTING_RUNS, Command, Option, parse_seconds

    return (
        Option(
            "--hang-timeout",
            "TIME",
            "The job counts as failed when nothing has moved on any node for this time, like 90 or 5m: no output, no "
            "collective, no CPU time, nothing read or written. Default: never.",
            short="the job fails if nothing moves for so long",
            sets="timeouts.hang_timeout_s",
            parse=parse_seconds,
            after="--shutdown-timeout",
        ),
        Option(
            "--busy-timeout",
            "TIME",
            "As --hang-timeout, but only output and collectives count as movement: also ends a rank that computes for "
            "ever. Default: never.",
            sets="timeouts.busy_timeout_s",
            parse=parse_seconds,
            after="--shutdown-timeout",
        ),
        Option(
            "--hang-report",
            "TIME|off",
            "When nothing has moved for this time, show which ranks wait for whom, and write hang.txt; the job goes "
            "on. Default: 5m, or ten times the longest pause so far, whichever is longer.",
            sets="timeouts.hang_report_s",
            parse=lambda text, option: None if text == "off" else parse_seconds(text, option),
            completes=("off",),
            after="--shutdown-timeout",
        ),
        Option(
            "--stacks",
            "RUN_ID",
            "Show what the workers of a run do now: who waits for whom, and at which line.",
            short="show where the workers of a run are",
            completes="ddplaunch.features.runs.completion:run_ids",
            heading=EXISTING_RUNS,
        ),
        Command("--stacks", run="ddplaunch.features.hangs.stacks:stacks", takes_hosts=True),
    )


def default_environ(config: LaunchConfig, inherited: Mapping[str, str], _workers: int) -> dict[str, str]:
    """The address of NCCL's RAS, if agents of this machine choose one: others know whether their machine has GPUs."""
    from ddplaunch.features.hangs import node_evidence

    is_chosen = not config.dry_run and config.is_local and node_evidence.own_address(inherited)
    return {node_evidence.RAS_VARIABLE: "127.0.0.1:<a free port>"} if is_chosen else {}
