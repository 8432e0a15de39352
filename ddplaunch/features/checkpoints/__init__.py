"""Where the checkpoints of a job are, ``--checkpoint``: the newest whole one is shown, and named to the next attempt.

The agents look (``search`` has the rules); the coordinator counts attempts that save nothing (``rounds.restarts``); the
launcher tells what was lost. Must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

EVENTS = {
    "checkpoint": "with `--checkpoint`: the newest whole checkpoint, once for each",
    "work_lost": "with `--checkpoint`: an attempt has ended, and the work since the checkpoint is lost: `s`",
    "checkpoint_suspect": "attempts have failed soon after they began from the checkpoint: it may be damaged",
}
EVENT_KEYS = {
    "saved_t": "when a checkpoint was complete, in seconds since 1970, by the clock of its file system",
    "step": "the number of the training step of a checkpoint",
}


def rows() -> tuple[object, ...]:
    """``--checkpoint`` and ``--set-aside-bad-checkpoint``."""
    from ddplaunch.rows import Condition, Option, flag

    return (
        Option(
            "--checkpoint",
            "DIR|GLOB",
            "Where the script saves checkpoints. {checkpoint} in its arguments and DDPLAUNCH_CHECKPOINT are the newest "
            "whole one; attempts that save nothing newer and fail alike are not repeated for ever.",
            sets="checkpoint",
            completes="folder",
            heading="Restarts and stopping",
        ),
        flag(
            "--set-aside-bad-checkpoint",
            "With --checkpoint: rename one from which two attempts have begun and soon failed; a mark `latest` that "
            "names it then names the one before. Default: only say it.",
            sets="set_aside_bad_checkpoint",
            only=(Condition("with --checkpoint", lambda config: config.checkpoint),),
            heading="Restarts and stopping",
        ),
    )


def for_agent(config: LaunchConfig) -> str | None:
    """Where to look, and whether to set one aside; None: nowhere."""
    import json

    return json.dumps([config.checkpoint, config.set_aside_bad_checkpoint]) if config.checkpoint else None
