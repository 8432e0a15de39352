"""The file of ``--metrics-file``: a watch of the runs that have one.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.features.metrics.metrics import MetricsWatch

if TYPE_CHECKING:
    from ddplaunch.launcher.watches import RunServices, Watch


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    path = Path(run.config.output.metrics_file or "").absolute()
    return (MetricsWatch(path, lambda: run.messages.run_id, run.participants, run.messages.show),)
