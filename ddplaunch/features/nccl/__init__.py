"""Which network NCCL has chosen, as it tells with NCCL_DEBUG=INFO, and whether that is one that a job can use.

``log`` reads NCCL's lines, in the launcher; ``agent`` keeps NCCL away from interfaces that lead to no other node, which
``interfaces`` finds, also for --plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

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


def default_environ(config: LaunchConfig, inherited: Mapping[str, str], workers: int) -> dict[str, str]:
    """NCCL_SOCKET_IFNAME as ``agent`` sets it on this machine, if the endpoint is an address; looks up no name."""
    if config.rendezvous is None or config.dry_run or config.interface or config.local_addr:
        return {}
    from ddplaunch.features.nccl.interfaces import VARIABLE, choice, interface_to
    from ddplaunch.system import devices, network

    try:
        has_gpus = bool(devices.visible_devices(inherited, config.workers.gpus))
    except ValueError:  # A start says it.
        return {}
    own = interface_to(next(iter(config.rendezvous.server_addresses), ""))
    names, wrong = choice(network.interfaces(), {own}) if own and has_gpus else ([], [])
    return {VARIABLE: f"={','.join(names)}"} if wrong else {}


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether NCCL tells its choices, by its own variable."""
    return environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE")
