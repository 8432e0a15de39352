"""The faults of ``--inject`` in the launcher: most runs have none, and load nothing of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.launcher.watches import RunServices, Watch


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    if not run.config.injections:
        return ()
    from ddplaunch.features.faults.injector import Injector

    return (Injector(run),)
