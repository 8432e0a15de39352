"""A run's own copy of its code, ``--snapshot``: workers run it in every attempt, whatever is edited meanwhile.

The command takes it before the run (``code_files``, ``copies``), agents look whether their host has it, and workers
import from it. What git ignores is not copied: links in the copy lead there. Must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def rows() -> tuple[object, ...]:
    """``--snapshot``, ``--snapshot-include``, ``--use-snapshot`` and ``--take-snapshot``."""
    from ddplaunch.rows import HOSTS, Command, Condition, Option, flag

    return (
        flag(
            "--snapshot",
            "Copy the code first, and run the copy in all attempts, so that edits do not change the run.",
            sets="snapshot",
            heading="Workers",
        ),
        Option(
            "--snapshot-include",
            "PATH",
            "With --snapshot: copy this file or folder, too, though git ignores it. Can be given several times.",
            sets="snapshot_include",
            multiple=True,
            only=(Condition("with --snapshot", lambda config: config.snapshot or config.sync),),
            completes="file",
            heading="Workers",
        ),
        flag(
            "--sync",
            "Copy the code to the hosts, which share no file system with this machine, and run it there.",
            sets="sync",
            only=(HOSTS,),
            heading="Hosts",
        ),
        Option(
            "--use-snapshot",
            "DIR",
            "Run the snapshot that --take-snapshot has made.",
            sets="code",
            variable="DDPLAUNCH_SNAPSHOT",
            completes="folder",
            heading="Workers",
        ),
        flag(
            "--take-snapshot",
            "Take the snapshot that --snapshot would take, and print its folder; run nothing.",
            heading="Before a run",
        ),
        Command("--take-snapshot", run="ddplaunch.features.snapshot.choice:show", takes_script=True),
    )


def at_start(config: LaunchConfig) -> LaunchConfig:
    """As ``choice.at_start``."""
    from ddplaunch.features.snapshot.choice import at_start

    return at_start(config)


def planned(config: LaunchConfig) -> LaunchConfig:
    """As ``choice.planned``."""
    from ddplaunch.features.snapshot.choice import planned

    return planned(config)


def for_agent(config: LaunchConfig) -> str | None:
    """The snapshot, for agents and workers: ``choice.for_agent``; None: the run has none."""
    from ddplaunch.features.snapshot.choice import for_agent

    return for_agent(config)
