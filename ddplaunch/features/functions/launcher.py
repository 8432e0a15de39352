"""A job of a function has failed if what a worker returned is lost. Runs in the launcher, in the main thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddplaunch.features.collect_logs.launcher import LogCollector
from ddplaunch.launcher.watches import RunServices, Watch

if TYPE_CHECKING:
    from ddplaunch.errors import LaunchError
    from ddplaunch.protocol.results import AttemptResult


class ReturnValues(Watch):
    """The values of a function's workers."""

    def __init__(self, run: RunServices, incomplete: Mapping[str, str]) -> None:
        """``incomplete``: by host, why not all of its files were copied, once the loop has ended."""
        self._run, self._incomplete = run, incomplete

    def failure(self, last: AttemptResult) -> LaunchError | None:
        """Why not all values have arrived, if all functions have returned."""
        if last.outcome != "succeeded":
            return None
        from ddplaunch.features.functions import target

        return target.lost_values(last, self._run.folder(), self._run.config, self._incomplete)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    if run.config.entry != "function":
        return ()
    if run.config.is_local:
        return (ReturnValues(run, {}),)
    collected = LogCollector(run, "logs" if run.config.output.collect_logs else "return values")
    return collected, ReturnValues(run, collected.missing)
