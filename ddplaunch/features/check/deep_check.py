"""``--check --deep``: the rates of the GPUs by name, and which GPUs are slower than others of their name.

Pure; runs in the launcher. A real job with one worker per node measures them, see ``worker_gpus``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from ddplaunch.cluster.hosts import fold
from ddplaunch.features.check.queries import GpuRates, NodeGpuRates
from ddplaunch.protocol import wire
from ddplaunch.text import grouped, median, quote, table

_SILENT = "its worker has ended without an answer"

Measured = Literal["matmul_flops", "memory_bytes_per_s", "peer_bytes_per_s"]

_SLOW_SHARE = 0.9
"""A GPU is an outlier below this share of the median: the rates of good GPUs of a kind differ by less than 5 %."""

_HEAD = ("GPUs", "hosts", "matmul", "memory", "to another GPU")
_NAMES: dict[Measured, str] = {
    "matmul_flops": "matmul",
    "memory_bytes_per_s": "memory",
    "peer_bytes_per_s": "to another GPU",
}


def of_nodes(names: Sequence[str], lines: Iterable[bytes]) -> list[tuple[str, NodeGpuRates]]:
    """The rates of the GPUs of each of ``names``, in their order; ``lines`` is what the workers have printed.

    A node whose worker has failed has a reason in place of rates.
    """
    by_rank = {rates.rank: rates for rates in map(_decoded, lines) if rates}
    return [(name, by_rank.get(rank, NodeGpuRates(rank=rank, missing=_SILENT))) for rank, name in enumerate(names)]


def _decoded(line: bytes) -> NodeGpuRates | None:
    try:
        rates: NodeGpuRates = wire.decode(line, (NodeGpuRates,))
    except wire.ProtocolError:
        return None
    return rates


def rates_table(nodes: Sequence[tuple[str, NodeGpuRates]]) -> str:
    """One line for all GPUs of one name; ``nodes`` are pairs of a host and its rates. Empty without GPUs."""
    by_name = grouped((gpu.name, (host, gpu)) for host, gpu in _gpus(nodes))
    rows = [
        (
            f"{len(found)} x {name or 'unknown'}",
            fold(dict.fromkeys(host for host, _ in found)),
            *(_range(measured, [getattr(gpu, measured) for _, gpu in found]) for measured in _NAMES),
        )
        for name, found in by_name.items()
    ]
    return "\n".join(table([_HEAD, *rows])) if rows else ""


def problems(nodes: Sequence[tuple[str, NodeGpuRates]]) -> list[str]:
    """Nodes and GPUs that could not be measured, and those that are slower than others."""
    lines = [f"{host}: no GPU was measured: {node.missing}" for host, node in nodes if node.missing]
    lines += [f"{host}: {_gpu(gpu)}: {gpu.problem}" for host, gpu in _gpus(nodes) if gpu.problem]
    for host, gpu, measured, usual, count in _outliers(_gpus(nodes)):
        rate: float = getattr(gpu, measured)
        share = f"{100 - 100 * rate / usual:.0f} % below the median of the {count} GPUs of its name"
        text = f"{_NAMES[measured]} {_rate(measured, rate)}, {share} ({_rate(measured, usual)})"
        lines.append(f"{host}: {_gpu(gpu)}: {text}")
    return lines


def _outliers(gpus: Iterable[tuple[str, GpuRates]]) -> list[tuple[str, GpuRates, Measured, float, int]]:
    """The rates that are more than 10 % below the median, in the order of ``gpus``, which are pairs with their host.

    Each with host, GPU and what was measured, the median of the GPUs of the same name on all nodes, and their count.
    A rate of 0 was not measured: it is neither judged nor counted.
    """
    given = list(gpus)
    rates = grouped(
        ((gpu.name, measured), getattr(gpu, measured))
        for _, gpu in given
        for measured in _NAMES
        if getattr(gpu, measured)
    )
    usual = {key: (median(values), len(values)) for key, values in rates.items()}
    return [
        (host, gpu, measured, *usual[gpu.name, measured])
        for host, gpu in given
        for measured in _NAMES
        if 0 < getattr(gpu, measured) < _SLOW_SHARE * usual[gpu.name, measured][0]
    ]


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
