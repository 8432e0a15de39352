"""A job of a function has failed if what a worker returned is lost. Runs in the launcher, in the main thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.launcher.watches import Watch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.errors import LaunchError
    from ddplaunch.launcher.watches import RunServices
    from ddplaunch.protocol.results import AttemptResult


class ReturnValues(Watch):
    """The values of a function's workers."""

    def __init__(self, run: RunServices) -> None:
        self._run = run

    def failure(self, last: AttemptResult, incomplete: Mapping[str, str]) -> LaunchError | None:
        """Why not all values have arrived, if all functions have returned."""
        if last.outcome != "succeeded":
            return None
        from ddplaunch.features.functions import function_call

        return function_call.lost_values(last, self._run.folder(), self._run.config, incomplete)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    return (ReturnValues(run),) if run.config.entry == "function" else ()
