"""Text of ``--check --deep``: the rates of the GPUs by name, and what is wrong with them.

Pure; runs in the launcher.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ddplaunch.cluster.hostlist import fold
from ddplaunch.health.gpu_outliers import MEASURED, Measured, outliers
from ddplaunch.text import quote, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddplaunch.protocol.gpu_rates import GpuRates, NodeGpuRates

_HEAD = ("GPUs", "hosts", "matmul", "memory", "to another GPU")
_NAMES: dict[Measured, str] = {
    "matmul_flops": "matmul",
    "memory_bytes_per_s": "memory",
    "peer_bytes_per_s": "to another GPU",
}


def rates_table(nodes: Sequence[tuple[str, NodeGpuRates]]) -> str:
    """One line for all GPUs of one name; ``nodes`` are pairs of a host and its rates. Empty without GPUs."""
    by_name: defaultdict[str, list[tuple[str, GpuRates]]] = defaultdict(list)
    for host, gpu in _gpus(nodes):
        by_name[gpu.name].append((host, gpu))
    rows = [
        (
            f"{len(found)} x {name or 'unknown'}",
            fold(dict.fromkeys(host for host, _ in found)),
            *(_range(measured, [getattr(gpu, measured) for _, gpu in found]) for measured in MEASURED),
        )
        for name, found in by_name.items()
    ]
    return "\n".join(table([_HEAD, *rows])) if rows else ""


def problems(nodes: Sequence[tuple[str, NodeGpuRates]]) -> list[str]:
    """Nodes and GPUs that could not be measured, and those that are slower than others."""
    lines = [f"{host}: no GPU was measured: {node.missing}" for host, node in nodes if node.missing]
    lines += [f"{host}: {_gpu(gpu)}: {gpu.problem}" for host, gpu in _gpus(nodes) if gpu.problem]
    for found in outliers(_gpus(nodes)):
        share = f"{100 - 100 * found.rate / found.median:.0f} % below the median of the {found.count} GPUs of its name"
        rate, usual = _rate(found.measured, found.rate), _rate(found.measured, found.median)
        lines.append(f"{found.host}: {_gpu(found.gpu)}: {_NAMES[found.measured]} {rate}, {share} ({usual})")
    return lines


def _gpus(nodes: Sequence[tuple[str, NodeGpuRates]]) -> Iterator[tuple[str, GpuRates]]:
    return ((host, gpu) for host, node in nodes for gpu in node.gpus)


def _gpu(gpu: GpuRates) -> str:
    return f"GPU {gpu.index}" + (f" ({quote(gpu.uuid)})" if gpu.uuid else "")


def _range(measured: Measured, rates: Sequence[float]) -> str:
    known = sorted(filter(None, rates))
    if not known:
        return "-"
    ends = dict.fromkeys((_rate(measured, known[0]), _rate(measured, known[-1])))
    return " to ".join(ends)


def _rate(measured: Measured, rate: float) -> str:
    if measured == "matmul_flops":
        return f"{_digits(rate / 1e12)} TFLOP/s"
    return f"{_digits(rate / 1e12)} TB/s" if rate >= 1e12 else f"{_digits(rate / 1e9)} GB/s"


def _digits(number: float) -> str:
    """With about three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
