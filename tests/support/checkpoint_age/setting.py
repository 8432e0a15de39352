"""What the agents are told. Runs in the launcher before a run that has ``--checkpoint``; pure."""

from __future__ import annotations

from ddplaunch.config import LaunchConfig


def for_agent(config: LaunchConfig) -> str | None:
    """The file; None: the feature has nothing to do."""
    return config.checkpoint
