"""The job of ``--check``: one worker per node; they all-reduce, then talk two by two. Rank 0 prints what was found.

By NCCL where every node has a GPU that its torch can use, else by gloo.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddplaunch.worker.pairs import partners

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = timedelta(seconds=60)
_ALL_S, _PAIR_S = 1.0, 0.15
_FIRST_BYTES = 1 << 16
_LAST_BYTES = {"gloo": 64 << 20, "nccl": 1 << 30}


def _facts() -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    return {"nccl": _nccl() if has_gpu and dist.is_nccl_available() else ""}


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _rate(step: Callable[[int], float], limit_s: float, last_bytes: int) -> float:
    """Bytes a second in the largest ``step`` that there is time for; it takes bytes and returns seconds.

    All that take part must get the same seconds: they go on, or stop, together.
    """
    step(4)  # Connects.
    spent_s, size = 0.0, _FIRST_BYTES
    while True:
        seconds = max(step(size), 1e-9)
        spent_s += seconds
        if 2 * size > last_bytes or spent_s + 2 * seconds > limit_s:
            return size / seconds
        size *= 2


class _Meter:
    """Times steps on ``device`` by ``group``; what the slowest took goes over gloo."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device

    def all_reduce(self, size: int) -> float:
        """Seconds for ``size`` bytes on all nodes."""
        data = torch.ones(size // 4, device=self._device)
        seconds = self._timed(lambda: dist.all_reduce(data, group=self._group))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def exchange(self, partner: int, size: int) -> float:
        """Seconds for ``size`` bytes to another rank while as many come from there."""
        sent, received = (torch.ones(size // 4, device=self._device) for _ in range(2))
        ops = [
            dist.P2POp(dist.isend, sent, partner, self._group),
            dist.P2POp(dist.irecv, received, partner, self._group),
        ]
        seconds = self._timed(lambda: [work.wait() for work in dist.batch_isend_irecv(ops)])
        if dist.get_rank() < partner:
            dist.send(seconds, partner)
        else:
            dist.recv(seconds, partner)
        return float(seconds)

    def _timed(self, step: Callable[[], object]) -> torch.Tensor:
        self._settle()
        started_s = time.perf_counter()
        step()
        self._settle()
        return torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _pair_rate(meter: _Meter, last_bytes: int) -> float:
    """The best of a few partners': one that is slow with all of them is slow itself."""
    rates = []
    for partner in partners(dist.get_rank(), dist.get_world_size()):
        if partner >= 0:
            rates.append(_rate(lambda size, other=partner: meter.exchange(other, size), _PAIR_S, last_bytes))  # type: ignore[misc]
        dist.barrier()
    return max(rates, default=0.0)


def main() -> None:
    """Meet the other nodes and measure; what goes wrong ends the job, as any worker's failure."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    world = dist.get_world_size()
    nodes: list[Any] = [None] * world
    dist.all_gather_object(nodes, _facts())
    backend = "nccl" if world > 1 and all(node["nccl"] for node in nodes) else "gloo"
    group = dist.new_group(backend="nccl", timeout=_TIMEOUT) if backend == "nccl" else None
    meter = _Meter(group, torch.device("cuda:0" if group else "cpu"))
    # In the best case, a ring, each node sends and receives this part of the data.
    part = 2 * (world - 1) / world
    rate = part * _rate(meter.all_reduce, _ALL_S, _LAST_BYTES[backend]) if world > 1 else 0.0
    pairs: list[Any] = [None] * world
    dist.all_gather_object(pairs, _pair_rate(meter, _LAST_BYTES[backend]) if world > 1 else 0.0)
    if dist.get_rank() == 0:
        found = {"nccl": [node["nccl"] for node in nodes], "backend": backend, "all": rate, "pairs": pairs}
        print("check: " + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
