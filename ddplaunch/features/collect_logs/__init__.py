"""``--collect-logs``: at the end of a run, the log files of other machines are copied to the launcher's run folder.

In the same way comes what the functions of workers have returned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import StartNotice

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def rows() -> tuple[object, ...]:
    """``--collect-logs``."""
    from ddplaunch.rows import LOGS, flag

    return (
        flag(
            "--collect-logs",
            "At the end copy the log files of all nodes to this machine. Default: the last lines of failed workers.",
            sets="output.collect_logs",
            only=(LOGS,),
            after="--timestamps",
        ),
    )


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
