"""GPUs that nobody uses, on a machine of several users: ``--gpus free:2``, ``--wait-for-gpus``.

``register`` has what all runs of the machine say about the GPUs that they use or wait for. ``choice`` chooses, in the
agent, and ``waiting`` waits there. Every run on GPUs is in the register. Must not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import StartNotice, UsageError

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

EVENTS = {
    "gpus_awaited": "with `--wait-for-gpus`: the run waits, `place` is its place; again if it or a holder has changed",
    "gpus_taken": "with `--wait-for-gpus`: the run has free GPUs, after `s`",
}
EVENT_KEYS = {"place": "place among the runs that wait for the same GPUs, from 1; 0: it is not known"}


def rows() -> tuple[object, ...]:
    """``--wait-for-gpus``."""
    from ddplaunch.rows import REAL_RUN, Option, parse_positive_seconds

    return (
        Option(
            "--wait-for-gpus",
            "TIME",
            "Wait so long for GPUs that nobody uses, first come, first served. Implies --gpus free. Default: do not.",
            sets="wait_for_gpus_s",
            parse=parse_positive_seconds,
            only=(REAL_RUN,),
            after="--gpus",
        ),
    )


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """Before the run: in a dry run, all GPUs are free. Only the GPUs of one machine can be waited for."""
    from ddplaunch.text import free_gpus

    config = _with_wait(config) if config.wait_for_gpus_s else config
    count = free_gpus(config.workers.gpus)
    if count is None or not config.dry_run:
        return config
    if not count and not isinstance(config.workers.nproc_per_node, int):
        hint = "Say how many, as --gpus free:4, or give --nproc-per-node a number."
        raise UsageError("--gpus free: a dry run does not know how many GPUs a node has", hint, ("--gpus",))
    return replace(config, workers=replace(config.workers, gpus=tuple(map(str, range(count))) if count else None))


def _with_wait(config: LaunchConfig) -> LaunchConfig:
    """Raises UsageError where runs could wait for each other for ever, or if the user has named GPUs."""
    from ddplaunch.text import free_gpus

    option, gpus = "--wait-for-gpus", config.workers.gpus
    if gpus and free_gpus(gpus) is None:
        hint = "CUDA_VISIBLE_DEVICES=2,4 with --gpus free:2 waits for these two."
        raise UsageError(f"{option}: waits for GPUs that nobody uses, and --gpus names some", hint, (option, "--gpus"))
    if config.has_peers:
        text = "a run of several nodes cannot wait: two such runs could each have a node that the other waits for"
        raise UsageError(f"{option}: {text}", "The queue of a scheduler gives all nodes at once.", (option,))
    return replace(config, workers=replace(config.workers, gpus=gpus or ("free",)))


def planned(config: LaunchConfig) -> LaunchConfig:
    """What --plan shows of the wait."""
    from ddplaunch.text import duration

    if not config.wait_for_gpus_s or config.dry_run:
        return config
    text = f"the run waits for GPUs that nobody uses, for at most {duration(config.wait_for_gpus_s)}"
    return replace(config, notices=(*config.notices, StartNotice("info", text)))


def for_agent(config: LaunchConfig) -> str | None:
    """For how many seconds to wait; None: do not."""
    return str(config.wait_for_gpus_s) if config.wait_for_gpus_s else None
