"""Deletes old run folders at the start of a run, which may need their space. Runs in the launcher, main thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.keep_runs import retention

if TYPE_CHECKING:
    from ddplaunch.launcher.watches import RunServices, Watch


def watches(run: RunServices) -> tuple[Watch, ...]:
    """Delete old run folders beside that of this run, in the default folder only. Nothing else is to be watched."""
    folder, output = run.folder(), run.config.output
    if folder and output.log_dir is None:
        retention.prune(folder.parent, output.keep_runs)
    return ()
