"""The command of ``--on-exit``: a watch of the runs that have one.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.launcher.watches import Watch

if TYPE_CHECKING:
    from ddplaunch.launcher.watches import RunEnd, RunServices


class OnExit(Watch):
    """Runs the command when all else has ended."""

    def __init__(self, run: RunServices) -> None:
        self._run = run

    def finish(self, end: RunEnd) -> None:
        """Run the command."""
        from ddplaunch.features.on_exit import on_exit

        messages = self._run.messages
        on_exit.run(self._run.config, end.result, end.error, messages.show, end.is_interrupted)
        messages.drain(end.result, end.is_interrupted)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (OnExit(run),) if run.config.on_exit else ()
