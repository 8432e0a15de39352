"""Which files of other machines are copied to the launcher. Runs in the launcher; pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import StartNotice
from ddplaunch.features.collect_logs.records import RESULT_FILE

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


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
    return "" if config.output.collect_logs else RESULT_FILE if config.entry == "function" else None
