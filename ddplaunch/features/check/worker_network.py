"""The job of ``--check``: one worker per node measures an all-reduce, then transfers in pairs; rank 0 prints the rates.

Runs in the workers. Uses NCCL where every node has a GPU that its torch can use, else gloo.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ddplaunch.features.check.queries import NETWORK_RATES, NetworkRates
from ddplaunch.protocol import wire

TURNS = 3
_TIMEOUT = timedelta(seconds=60)
_ALL_REDUCE_S, _PAIR_S = 1.0, 0.15
_FIRST_BYTES = 1 << 16
_TEXT_BYTES = 64
_LAST_BYTES = {"gloo": 64 << 20, "nccl": 1 << 30}


def _nccl_version() -> str:
    """Version of NCCL; empty if this worker cannot use it."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _of_all_ranks(text: str) -> list[str]:
    """The short ``text`` of each rank. As bytes: ``all_gather_object`` needs numpy, which torch does not bring."""
    mine = torch.tensor([*text.encode().ljust(_TEXT_BYTES)], dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [bytes(each.tolist()).decode().strip() for each in found]


def _rate(step: Callable[[int], float], limit_s: float, last_bytes: int) -> float:
    """Bytes per second of the largest ``step`` within ``limit_s``; ``step`` takes bytes and returns seconds.

    ``step`` must return equal seconds to all participants, so that they continue or stop together.
    """
    step(4)  # The first step also connects the ranks, so it is not timed.
    spent_s, size = 0.0, _FIRST_BYTES
    while True:
        seconds = max(step(size), 1e-9)
        spent_s += seconds
        if 2 * size > last_bytes or spent_s + 2 * seconds > limit_s:
            return size / seconds
        size *= 2


class _Meter:
    """Times steps on ``device`` by ``group``; participants agree on the time over gloo."""

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
        """Seconds to send ``size`` bytes to another rank while receiving as many from it."""
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
        self._synchronize()
        started_s = time.perf_counter()
        step()
        self._synchronize()
        return torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def round_robin_partner(rank: int, world: int) -> Iterator[int]:
    """Round-robin schedule for pairwise bandwidth tests: the partner of ``rank`` in each of up to ``TURNS`` turns.

    In each turn all ranks are in pairs; with an odd number of ranks one of them pauses, its partner is -1.
    """
    circle = world - 1 + world % 2
    for turn in range(min(TURNS, circle)):
        alone = turn * (circle + 1) // 2 % circle
        if rank == circle:
            yield alone
        elif rank == alone:
            yield circle if circle < world else -1
        else:
            yield (turn - rank) % circle


def _pair_rate(meter: _Meter, last_bytes: int) -> float:
    """Best rate with a few partners: a node that is slow with all of them is slow itself."""
    rates = []
    for partner in round_robin_partner(dist.get_rank(), dist.get_world_size()):
        if partner >= 0:
            rates.append(_rate(lambda size, other=partner: meter.exchange(other, size), _PAIR_S, last_bytes))  # type: ignore[misc]
        dist.barrier()
    return max(rates, default=0.0)


def main() -> None:
    """Join the process group, measure, and print on rank 0. Any exception fails the job."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    world = dist.get_world_size()
    nccl_versions = _of_all_ranks(_nccl_version())
    backend = "nccl" if world > 1 and all(nccl_versions) else "gloo"
    group = dist.new_group(backend="nccl", timeout=_TIMEOUT) if backend == "nccl" else None
    meter = _Meter(group, torch.device("cuda:0" if group else "cpu"))
    # In a ring, the best algorithm, each node sends and receives this share of the data.
    share = 2 * (world - 1) / world
    rate = share * _rate(meter.all_reduce, _ALL_REDUCE_S, _LAST_BYTES[backend]) if world > 1 else 0.0
    pairs = map(float, _of_all_ranks(str(_pair_rate(meter, _LAST_BYTES[backend]) if world > 1 else 0.0)))
    if dist.get_rank() == 0:
        rates = NetworkRates(nccl=tuple(nccl_versions), pairs=tuple(pairs), backend=backend, all_reduce=rate)
        print(NETWORK_RATES + wire.encode(rates).decode("ascii"), end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
