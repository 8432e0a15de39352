"""Which GPUs are slower than others of their name, by the rates that ``--check --deep`` has measured.

Used by the launcher. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.gpu_rates import GpuRates
from ddplaunch.text import median

if TYPE_CHECKING:
    from collections.abc import Iterable


Measured = Literal["matmul_flops", "memory_bytes_per_s", "peer_bytes_per_s"]
MEASURED: tuple[Measured, ...] = ("matmul_flops", "memory_bytes_per_s", "peer_bytes_per_s")

SLOW_SHARE = 0.9
"""A GPU is an outlier below this share of the median: the rates of good GPUs of a kind differ by less than 5 %."""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """One rate of one GPU; ``median`` is that of the ``count`` GPUs of the same name on all nodes."""

    host: str
    gpu: GpuRates
    measured: Measured
    rate: float
    median: float
    count: int


def outliers(gpus: Iterable[tuple[str, GpuRates]]) -> list[Outlier]:
    """The rates that are more than 10 % below the median, in the order of ``gpus``, which are pairs with their host.

    A rate of 0 was not measured: it is neither judged nor counted.
    """
    given = list(gpus)
    rates: defaultdict[tuple[str, Measured], list[float]] = defaultdict(list)
    for _, gpu in given:
        for measured in MEASURED:
            if getattr(gpu, measured):
                rates[gpu.name, measured].append(getattr(gpu, measured))
    medians = {key: median(values) for key, values in rates.items()}
    return [
        Outlier(
            host=host,
            gpu=gpu,
            measured=measured,
            rate=getattr(gpu, measured),
            median=medians[gpu.name, measured],
            count=len(rates[gpu.name, measured]),
        )
        for host, gpu in given
        for measured in MEASURED
        if 0 < getattr(gpu, measured) < SLOW_SHARE * medians[gpu.name, measured]
    ]
