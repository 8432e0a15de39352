"""The keeper: it has imported torch for the next run of this user, and forks that run's agent and forkserver.

A process of its own, in its own session, that no run owns: it has no run tag, no GPU, no port and no terminal. It has
one thread. Nothing that belongs to a run stays in it: an agent is a fork of it, with all that the new command has set.
It never imports a module of the user, and ends itself if one is in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def rows() -> tuple[object, ...]:
    """``--keep-warm``."""
    from ddplaunch.rows import REAL_RUN, Option, parse_seconds

    return (
        Option(
            "--keep-warm",
            "TIME",
            "Leave torch and --preload imported for the next run, for this time; 0: use nothing that is left.",
            short="leave torch imported for the next run, like 10m",
            sets="keep_warm_s",
            parse=parse_seconds,
            variable="DDPLAUNCH_KEEP_WARM",
            only=(REAL_RUN,),
            after="--preload",
        ),
    )


def for_agent(config: LaunchConfig) -> str | None:
    """What each agent leaves for the next run, a KeeperSpec, encoded; None: nothing."""
    from ddplaunch.features.warm.early_agent import for_agent

    return for_agent(config)
