"""``--check --deep``: measures the GPUs of all nodes, in a real job with one worker per node.

Runs in the launcher, after ``--check`` has found that such a job runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.check import job as check_job
from ddplaunch.features.check.records import NodeGpuRates
from ddplaunch.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.config import LaunchConfig

MODULE = "ddplaunch.features.check.worker_gpus"
"""Module that the job's workers run."""

_PREFIX = b"check-gpus: "
"""Start of the line with the rates of a node. ``features.check.worker_gpus`` has it too."""

_SILENT = "its worker has ended without an answer"


def measure(config: LaunchConfig, names: Sequence[str]) -> list[tuple[str, NodeGpuRates]]:
    """The rates of the GPUs of each of ``names``, which are nodes of ``config``, in their order.

    A node whose worker fails has a reason in place of rates.

    Raises:
        LaunchError: the user stopped it, or the job could not be run.
    """
    _, lines = check_job.run(check_job.job(config, names, MODULE), _PREFIX)
    by_rank = {rates.rank: rates for rates in map(_decoded, lines) if rates}
    return [(name, by_rank.get(rank, NodeGpuRates(rank=rank, missing=_SILENT))) for rank, name in enumerate(names)]


def _decoded(line: bytes) -> NodeGpuRates | None:
    try:
        rates: NodeGpuRates = wire.decode(line, (NodeGpuRates,))
    except wire.ProtocolError:
        return None
    return rates
