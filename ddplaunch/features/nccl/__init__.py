"""Which network NCCL has chosen, as it tells with NCCL_DEBUG=INFO, and whether that is one that a job can use.

``log`` reads NCCL's lines, in the launcher; ``agent`` keeps NCCL away from interfaces that lead to no other node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVENTS = {"nccl_network": "all ranks have told which network NCCL has chosen"}


def rows() -> tuple[object, ...]:
    """``--nccl-report``."""
    from ddplaunch.rows import REAL_RUN, flag

    return (
        flag(
            "--nccl-report",
            "Say which network NCCL has chosen, InfiniBand or sockets, and warn if it looks wrong. Default: only with "
            "NCCL_DEBUG=INFO.",
            sets="output.nccl_report",
            only=(REAL_RUN,),
            after="--shutdown-timeout",
        ),
    )


def variables(options: Mapping[str, Any], environ: Mapping[str, str], *, to_hosts: bool) -> dict[str, str]:
    """NCCL's own messages, for ``--nccl-report``; those that the user has asked for stay."""
    if not options["nccl_report"] or speaks(environ):
        return {}
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether NCCL tells its choices, by its own variable."""
    return environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE")
