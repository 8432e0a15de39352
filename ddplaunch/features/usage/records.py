"""Usage samples: what workers, GPUs and nodes use, every 2 s; the records of an agent, and the mean of several samples.

Not the samples of an examination, which are about what a worker does. An agent sends a UsageStarted at the start of an
attempt, and a UsageSampled about every 10 s. Loaded when there is something to sample: not at the start. Pure.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.features.gpus.records import MAX_GPUS, Gpu
from ddplaunch.features.usage import UsageRecord
from ddplaunch.features.usage.quantities import QUANTITIES
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Quantity, Seconds, Size, at_most, between

if TYPE_CHECKING:
    from collections.abc import Sequence

PERIOD_S = 2.0
RECORD_S = 10.0
"""Seconds between two samples, and between two records of an agent."""

MAX_SAMPLES = 64
"""In one record."""

Span = Annotated[float, between(0, 1 << 32)]
Amounts = Annotated[tuple[Quantity | None, ...], at_most(MAX_SLOTS_PER_HOST)]
Reasons = Annotated[tuple[OneLine | None, ...], at_most(MAX_GPUS)]


@dataclass(frozen=True, kw_only=True)
class UsageStarted(UsageRecord):
    """Agent to launcher, when the workers of ``attempt`` run: what the samples that follow are about.

    Attributes:
        at_s: the agent's ``time.monotonic()``.
        ranks: global ranks, in order of local ranks: the order of all values about workers.
        gpus: the GPUs of the job on this node: the order of all values about GPUs.
        gpu_of_worker: for each worker the row of its first GPU in ``gpus``, or None.
        cpus: CPUs of the machine.
        memory_bytes: main memory of the machine.
    """

    attempt: Count
    at_s: Seconds
    ranks: Annotated[tuple[Count, ...], at_most(MAX_SLOTS_PER_HOST)]
    gpus: Annotated[tuple[Gpu, ...], at_most(MAX_GPUS)] = ()
    gpu_of_worker: Annotated[tuple[Count | None, ...], at_most(MAX_SLOTS_PER_HOST)] = ()
    cpus: Count = 0
    memory_bytes: Size = 0


@dataclass(frozen=True, kw_only=True)
class NodeUsage:
    """What a node used. None: not known.

    Attributes:
        cpu: percent of all CPUs that were not idle; waiting for a disk counts.
        mem: bytes of memory in use.
        disk: percent of the log folder's file system in use.
        rx: bytes per second received by network adapters, and ``tx`` sent; RDMA is not counted.
    """

    cpu: Quantity | None = None
    mem: Quantity | None = None
    disk: Quantity | None = None
    rx: Quantity | None = None
    tx: Quantity | None = None


@dataclass(frozen=True, kw_only=True)
class WorkersUsage:
    """What each worker used, as UsageStarted orders them. None: not known, or it has ended.

    Attributes:
        cpu: percent of one CPU, with its children.
        rss: bytes of memory of its process, without its children.
        rd: bytes per second that it and its children have read from files and pipes, and ``wr`` written.
        quiet: seconds since its last output, or its start.
        lines: lines of output per second.
    """

    cpu: Amounts = ()
    rss: Amounts = ()
    rd: Amounts = ()
    wr: Amounts = ()
    quiet: Amounts = ()
    lines: Amounts = ()


@dataclass(frozen=True, kw_only=True)
class GpusUsage:
    """What each GPU did, as UsageStarted orders them. None: not known.

    Attributes:
        util: percent of the time in which a kernel ran.
        mem: bytes in use.
        power: watts.
        temp: degrees Celsius.
        throttle: why its clocks are lowered.
    """

    util: Amounts = ()
    mem: Amounts = ()
    power: Amounts = ()
    temp: Amounts = ()
    throttle: Reasons = ()


@dataclass(frozen=True, kw_only=True)
class UsageSample:
    """What was used in a span of time. The fields of its parts have the names that the files in samples/ have.

    Attributes:
        at_s: the end of the span, by the agent's ``time.monotonic()``.
        span_s: its length in seconds.
    """

    at_s: Seconds
    span_s: Span
    node: NodeUsage
    workers: WorkersUsage
    gpus: GpusUsage | None = None


@dataclass(frozen=True)
class UsageSampled(UsageRecord):
    """Agent to launcher: the samples of ``attempt`` since the last record, the oldest first."""

    attempt: Count
    samples: Annotated[tuple[UsageSample, ...], at_most(MAX_SAMPLES)]


FROM_AGENT = (UsageStarted, UsageSampled)

_LARGEST = frozenset(each.key for each in QUANTITIES if each.peaks)

_Part = TypeVar("_Part", NodeUsage, WorkersUsage, GpusUsage)


def mean(samples: Sequence[UsageSample]) -> UsageSample:
    """One sample of the whole span of at least one sample of one attempt."""
    if len(samples) == 1:
        return samples[0]
    spans = [sample.span_s for sample in samples]
    gpus = [sample.gpus or GpusUsage() for sample in samples]
    return UsageSample(
        at_s=samples[-1].at_s,
        span_s=sum(spans),
        node=_merged([sample.node for sample in samples], spans),
        workers=_merged([sample.workers for sample in samples], spans),
        gpus=_merged(gpus, spans) if any(sample.gpus for sample in samples) else None,
    )


def _merged(parts: Sequence[_Part], spans: Sequence[float]) -> _Part:
    """One part of several, field by field, and row by row where a field has some."""
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(parts[0])):
        merge = _last if name == "throttle" else _most if name in _LARGEST else _mean
        column = [getattr(part, name) for part in parts]
        if isinstance(parts[0], NodeUsage):
            values[name] = merge(column, spans)
        else:
            rows = range(max(map(len, column)))
            values[name] = tuple(
                merge([each[row] if row < len(each) else None for each in column], spans) for row in rows
            )
    return type(parts[0])(**values)


def _mean(values: Sequence[Any], spans: Sequence[float]) -> Any:
    known = [(value, span) for value, span in zip(values, spans, strict=True) if value is not None]
    total = sum(span for _, span in known)
    return sum(value * span for value, span in known) / total if total else None


def _most(values: Sequence[Any], _spans: Sequence[float]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _last(values: Sequence[Any], _spans: Sequence[float]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)
