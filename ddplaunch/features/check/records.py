"""What ``--check --deep`` measures: records that the worker of each node prints, one line each. No behaviour."""

from __future__ import annotations

from typing import Annotated

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Quantity, at_most

MAX_GPUS = 256


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """The rates of one GPU; 0: not measured.

    Attributes:
        index: CUDA's index in the worker.
        uuid: empty if torch does not tell it.
        matmul_flops: floating point operations per second, of a product of two large matrices.
        memory_bytes_per_s: bytes read and written per second.
        peer_bytes_per_s: to and from another GPU of the node, of which the fastest counts.
        problem: why a rate is missing; empty if none is.
    """

    index: Count
    name: OneLine = ""
    uuid: OneLine = ""
    matmul_flops: Quantity = 0.0
    memory_bytes_per_s: Quantity = 0.0
    peer_bytes_per_s: Quantity = 0.0
    problem: OneLine = ""


@dataclass(frozen=True, kw_only=True)
class NodeGpuRates:
    """The rates of the GPUs of one node; ``missing`` says why there are none. ``rank`` is that of the worker."""

    rank: Count
    gpus: Annotated[tuple[GpuRates, ...], at_most(MAX_GPUS)] = ()
    missing: OneLine = ""
