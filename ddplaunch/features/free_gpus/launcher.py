"""Shows for which GPUs a run waits, and reports how long it has waited. Runs in the launcher, in the main thread."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.features.free_gpus.records import GpuWaitEnded, WaitsForGpus
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.text import duration

if TYPE_CHECKING:
    from ddplaunch.protocol.run_result import RunResult


class GpuWait(Watch):
    """Of one run."""

    def __init__(self, run: RunServices) -> None:
        self._run, self._waited_s = run, 0.0

    def on_event(self, index: int, event: object) -> None:
        """A line of the agent, or the end of its wait."""
        show, host = self._run.messages.show, self._run.nodes.all[index].host
        if isinstance(event, WaitsForGpus):
            show(event.text, Level.NORMAL, "gpus_awaited", node=index, place=event.place)
        elif isinstance(event, GpuWaitEnded):
            self._waited_s = round(event.waited_s, 1)
            if event.gpus:
                text = f"{host} has free GPUs: {event.gpus}, after {duration(event.waited_s)}"
                show(text, Level.NORMAL, "gpus_taken", node=index, s=self._waited_s)

    def add_to_result(self, result: RunResult) -> RunResult:
        """For how long the run has waited, also if it has got none."""
        return replace(result, waited_for_gpus_s=self._waited_s)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (GpuWait(run),)
