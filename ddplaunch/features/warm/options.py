"""``--keep-warm``: what the agents of a run leave for the next one. Runs in the launcher."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.features.warm.records import KeepWarm
from ddplaunch.protocol import wire

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def for_agent(config: LaunchConfig) -> str:
    """The KeepWarm for each agent, encoded; empty: it leaves nothing."""
    record = _keep_warm(config)
    return wire.encode(record).decode() if record else ""


def _keep_warm(config: LaunchConfig) -> KeepWarm | None:
    """What an agent leaves. Other machines do not see the end of this session, or of a SLURM job."""
    if not config.keep_warm_s or config.dry_run or config.task or config.transport == "srun":
        return None
    if config.transport == "local":
        leader = os.getsid(0)
        # Where daemons have made the session, as those of SLURM do, its leader may have ended long ago.
        is_watched = leader != os.getpid() and os.path.exists(f"/proc/{leader}")
        return KeepWarm(config.keep_warm_s, leader if is_watched else 0)
    return None if "SLURM_JOB_ID" in os.environ else KeepWarm(config.keep_warm_s)
