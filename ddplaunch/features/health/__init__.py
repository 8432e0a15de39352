"""Whether the hardware of the nodes is sound: at the start, while workers run, after a failure, and across runs.

``agent`` and ``launcher`` are its parts of a run; ``gpu_faults`` belongs to the first. In the launcher, ``node_memory``
keeps what runs have found in ``nodes_file``. ``log_folder`` tries the folder of the logs, ``gpu_events`` reads the
kernel's log, ``readiness`` is for ``--check-first``. The other modules are pure: values and records in, findings and
sentences out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

EVENTS = {
    "health": "a finding about the hardware of a node",
}
EVENT_KEYS = {
    "rule": "name of the rule of a finding",
    "severity": "of a finding: `refuse` or `warn`",
    "gpu": "index of the GPU",
}


def rows() -> tuple[object, ...]:
    """``--health``, ``--forget``, ``--ps --nodes``."""
    from ddplaunch.rows import EXISTING_RUNS, Command, Option, flag

    return (
        Option(
            "--health",
            "off|warn|refuse",
            "Before the start, look at the GPUs, disks and clock of every node. refuse: a node with a fault is not "
            "used; warn: faults are only shown; off: nothing is looked at. Default: refuse.",
            sets="health",
            choices=("off", "warn", "refuse"),
            heading="Restarts and stopping",
        ),
        flag(
            "--nodes",
            "With --ps: list the nodes in which earlier runs have found faults. (--nnodes is the number of nodes.)",
            of="--ps",
        ),
        Option(
            "--forget",
            "HOSTS|all",
            "Forget the faults that earlier runs have found in these hosts, as after a repair.",
            heading=EXISTING_RUNS,
        ),
        Command("--forget", run="ddplaunch.features.health.node_memory:forget"),
        Command("--nodes", run="ddplaunch.features.health.node_memory:list_all"),
    )


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """``config`` with the hosts of which earlier runs know faults at the end of the list, and a notice about them."""
    from ddplaunch.features.health.node_memory import prepare

    return prepare(config)


def for_agent(config: LaunchConfig) -> str | None:
    """``--check-first``; None: nodes need not pass the check."""
    return config.check_first
