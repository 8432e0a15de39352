"""The part of a run in the launcher that copies files from other machines. Loaded with every run: imports little."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.features.collect_logs.log_collector import LogCollector
    from ddplaunch.launcher.watches import RunServices, Watch


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher; in a run of a function it is ``features.functions`` that has a collector."""
    is_wanted = run.config.output.collect_logs and run.config.entry != "function"
    return (collector(run, "logs"),) if is_wanted and not run.config.is_local else ()


def collector(run: RunServices, kind: str) -> LogCollector:
    """What copies the files of the nodes of this run; ``kind`` is as for LogCollector."""
    from ddplaunch.features.collect_logs.log_collector import LogCollector

    return LogCollector(run.folder(), run.participants, run.messages, kind)
