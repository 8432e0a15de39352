"""The job of ``--check --deep``: one worker per node measures its GPUs, and prints a NodeGpuRates.

Runs in the workers. All GPUs multiply and copy at the same time, as in a job, so that a power supply or a fan that is
too weak is seen; then one pair of GPUs after the other copies. A GPU that blocks delays the end to ``LIMIT_S``.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ddplaunch.features.check.queries import GPU_RATES, GpuRates, NodeGpuRates
from ddplaunch.protocol import wire
from ddplaunch.text import quote

LIMIT_S = 120.0
_MEASURE_S, _PAIR_S, _LONG_STEP_S = 1.0, 0.05, 0.05
_MATRIX_ROWS = (512, 2048, 8192)
_COPY_BYTES = (16 << 20, 128 << 20, 1 << 30)
_PEER_BYTES = (16 << 20, 256 << 20)
_NOT_ENDED = f"it has not ended a measurement in {LIMIT_S:.0f} s"

_Value = TypeVar("_Value")


class _Found:
    """The rates so far. Threads of all GPUs add to it."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._gpus = {index: GpuRates(index=index, problem=_NOT_ENDED) for index in range(count)}

    def add(self, index: int, **rates: Any) -> None:
        with self._lock:
            self._gpus[index] = replace(self._gpus[index], **rates)

    def end(self) -> None:
        """All measurements have ended, well or with a problem."""
        for gpu in self._gpus.values():
            self.add(gpu.index, problem="" if gpu.problem == _NOT_ENDED else gpu.problem)

    def show(self, missing: str = "") -> None:
        """Print the record, in one write, whatever is still missing."""
        with self._lock:
            record = NodeGpuRates(
                rank=int(os.environ.get("RANK", "0")), gpus=tuple(self._gpus.values()), missing=quote(missing, 500)
            )
        print(GPU_RATES + wire.encode(record).decode("ascii"), end="", flush=True)


def main() -> None:
    """Measure and print; never fails because of a GPU."""
    if not torch.cuda.is_available():
        _Found(0).show(f"torch {torch.__version__} finds no GPU that it can use")
        return
    found = _Found(torch.cuda.device_count())
    timer = threading.Timer(LIMIT_S, _end_late, [found])
    timer.daemon = True
    timer.start()
    _measure(found, range(torch.cuda.device_count()))
    timer.cancel()
    found.end()
    found.show()


def _end_late(found: _Found) -> None:
    found.show()
    os._exit(0)  # A thread that the driver blocks would not end.


def _measure(found: _Found, indices: Sequence[int]) -> None:
    with ThreadPoolExecutor(len(indices)) as threads:
        for measure in (_identify, _matmul, _copy):
            list(threads.map(lambda index, step=measure: _guarded(found, index, step), indices))
    sent: dict[int, float] = dict.fromkeys(indices, 0.0)
    received = dict(sent)
    for first, second in itertools.permutations(indices, 2):
        rate = _guarded(found, first, lambda _first, _found: _exchange(first, second)) or 0.0  # noqa: B023
        sent[first], received[second] = max(sent[first], rate), max(received[second], rate)
    for index in indices:
        found.add(index, peer_bytes_per_s=min(sent[index], received[index]))


def _guarded(found: _Found, index: int, measure: Callable[[int, _Found], _Value]) -> _Value | None:
    """What ``measure`` returns; None if it fails, and the reason in ``found``."""
    try:
        with torch.cuda.device(index):
            return measure(index, found)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        found.add(index, problem=quote(f"{type(error).__name__}: {lines[0]}", 200))
        return None


def _identify(index: int, found: _Found) -> None:
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    found.add(index, name=quote(properties.name), uuid=quote(f"GPU-{uuid}" if uuid else ""))


def _matmul(index: int, found: _Found) -> None:
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(index) >= (8, 0) else torch.float16

    def step_of(rows: int) -> Callable[[], object]:
        # Random numbers: a product of equal ones takes less power.
        left, right = (torch.randn(rows, rows, device=f"cuda:{index}", dtype=dtype) for _ in range(2))
        return lambda: torch.mm(left, right)

    rows, step = _largest(step_of, _MATRIX_ROWS, (index,))
    found.add(index, matmul_flops=2 * rows**3 / _seconds(step, _MEASURE_S, (index,)))


def _copy(index: int, found: _Found) -> None:
    def step_of(size: int) -> Callable[[], object]:
        source, target = (torch.zeros(size // 4, device=f"cuda:{index}") for _ in range(2))
        return lambda: target.copy_(source)

    size, step = _largest(step_of, _COPY_BYTES, (index,))
    found.add(index, memory_bytes_per_s=2 * size / _seconds(step, _MEASURE_S, (index,)))


def _exchange(first: int, second: int) -> float:
    """Bytes per second from GPU ``first`` to GPU ``second``."""

    def step_of(size: int) -> Callable[[], object]:
        source, target = (torch.zeros(size // 4, device=f"cuda:{index}") for index in (first, second))
        return lambda: target.copy_(source)

    size, step = _largest(step_of, _PEER_BYTES, (first, second))
    return size / _seconds(step, _PAIR_S, (first, second))


def _largest(
    step_of: Callable[[int], Callable[[], object]], sizes: Sequence[int], gpus: Sequence[int]
) -> tuple[int, Callable[[], object]]:
    """The largest of ``sizes`` whose step is short, and that step, which has run."""
    for size in sizes:
        step = step_of(size)
        if _seconds(step, 0.0, gpus) > _LONG_STEP_S:
            break
    return size, step


def _seconds(step: Callable[[], object], limit_s: float, gpus: Sequence[int]) -> float:
    """Seconds that one ``step`` takes, of so many that they take about ``limit_s``."""
    step()  # The first loads kernels and allocates.
    count = 1
    while True:
        _synchronize(gpus)
        started_s = time.perf_counter()
        for _ in range(count):
            step()
        _synchronize(gpus)
        spent_s = max(time.perf_counter() - started_s, 1e-9)
        if spent_s >= 0.8 * limit_s:
            return spent_s / count
        count = min(8 * count, int(count * limit_s / spent_s) + 1)


def _synchronize(gpus: Sequence[int]) -> None:
    for index in gpus:
        torch.cuda.synchronize(index)


if __name__ == "__main__":
    main()
