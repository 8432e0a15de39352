"""Why a rank is slower than the others, as far as the kernel's counters and its GPU tell. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.text import median, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.features.slow_ranks.records import RankLoad

_CPU_WAIT, _CPU_USE = 0.05, 0.05
"""A cause is named if the rank exceeds the middle of the others by this share of the time."""

_IO_PER_S = 1 << 20
_IO_FACTOR = 2
"""Reading is named from so many bytes a second on, if that is so much more than the others."""


def reason(rank: int, loads: Sequence[RankLoad]) -> str:
    """What distinguishes ``rank`` from the others, as ``it waits for a CPU``; empty if nothing does."""
    own = next((load for load in loads if load.rank == rank and load.window_s > 0), None)
    others = [load for load in loads if load.rank != rank and load.window_s > 0]
    if own is None:
        return ""
    if own.throttled:
        return f"its GPU is throttled: {own.throttled}"
    if not others:
        return ""
    if _excess(own, others, lambda load: load.run_queue_wait_s) > _CPU_WAIT:
        return "it waits for a CPU"
    io, usual = _rate(own), median(map(_rate, others))
    if io > max(_IO_PER_S, _IO_FACTOR * usual):
        return f"it reads or writes {size(io)}/s, the others {size(usual)}/s"
    if _excess(own, others, lambda load: load.cpu_s) > _CPU_USE:
        return "it computes more than the others on the CPU"
    return ""


def _excess(own: RankLoad, others: Sequence[RankLoad], seconds: Callable[[RankLoad], float]) -> float:
    return seconds(own) / own.window_s - median(seconds(load) / load.window_s for load in others)


def _rate(load: RankLoad) -> float:
    return load.io_bytes / load.window_s
