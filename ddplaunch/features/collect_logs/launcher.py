"""Which files of other machines are copied to the launcher, and the part of a run in the launcher that copies them.

Runs in the launcher. Loaded with every run: imports little.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import StartNotice

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.collect_logs.log_collector import LogCollector
    from ddplaunch.launcher.watches import RunServices, Watch


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """``config``, with a notice where nothing is copied."""
    if not config.is_local or not config.output.collect_logs:
        return config
    notice = StartNotice("detail", "--collect-logs has no effect: all logs are written on this machine")
    return replace(config, notices=(*config.notices, notice))


def for_agent(config: LaunchConfig) -> str | None:
    """The only name of the files to send; empty: all; None: no file is sent."""
    if config.is_local:
        return None
    from ddplaunch.features.collect_logs.records import RESULT_FILE

    return "" if config.output.collect_logs else RESULT_FILE if config.entry == "function" else None


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher; in a run of a function it is ``features.functions`` that has a collector."""
    is_wanted = run.config.output.collect_logs and run.config.entry != "function"
    return (collector(run, "logs"),) if is_wanted and not run.config.is_local else ()


def collector(run: RunServices, kind: str) -> LogCollector:
    """What copies the files of the nodes of this run; ``kind`` is as for LogCollector."""
    from ddplaunch.features.collect_logs.log_collector import LogCollector

    return LogCollector(run.folder(), run.participants, run.messages, kind)
