"""Usage samples: what workers, GPUs and nodes use, every 2 s; the records of an agent, and the mean of several samples.

Not the samples of an examination, which are about what a worker does. An agent sends a UsageStarted at the start of an
attempt, and a UsageSampled about every 10 s. Loaded when there is something to sample: not at the start. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.features.gpus.records import MAX_GPUS, Gpu
from ddplaunch.features.usage import UsageRecord
from ddplaunch.features.usage.quantities import BY_NAME
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, Limit, OneLine, Quantity, Seconds, Size, at_most, between

PERIOD_S = 2.0
RECORD_S = 10.0
"""Seconds between two samples, and between two records of an agent."""

MAX_SAMPLES = 64
"""In one record."""

QuantityName = Annotated[str, Limit("the name of a quantity", BY_NAME.__contains__)]
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
class UsageSample:
    """What was used in a span of time.

    Attributes:
        at_s: the end of the span, by the agent's ``time.monotonic()``.
        span_s: its length in seconds.
        values: by name of the quantity, of each worker or GPU as UsageStarted orders them; of the node one. None: not
            known, or the worker has ended. docs/samples.md says what each is.
        throttle: for each GPU why its clocks are lowered.
    """

    at_s: Seconds
    span_s: Span
    values: dict[QuantityName, Amounts]
    throttle: Reasons = ()


@dataclass(frozen=True)
class UsageSampled(UsageRecord):
    """Agent to launcher: the samples of ``attempt`` since the last record, the oldest first."""

    attempt: Count
    samples: Annotated[tuple[UsageSample, ...], at_most(MAX_SAMPLES)]


FROM_AGENT = (UsageStarted, UsageSampled)

_Merge = Callable[[Sequence[Any], Sequence[float]], Any]


def mean(samples: Sequence[UsageSample]) -> UsageSample:
    """One sample of the whole span of at least one sample of one attempt."""
    if len(samples) == 1:
        return samples[0]
    spans = [sample.span_s for sample in samples]
    values = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.values):
        columns = [sample.values.get(name, ()) for sample in samples]
        values[name] = _merged(columns, spans, _most if BY_NAME[name].peaks else _mean)
    return UsageSample(
        at_s=samples[-1].at_s,
        span_s=sum(spans),
        values=values,
        throttle=_merged([sample.throttle for sample in samples], spans, _last),
    )


def _merged(columns: Sequence[Sequence[Any]], spans: Sequence[float], merge: _Merge) -> tuple[Any, ...]:
    """Of one quantity in several samples, row by row."""
    rows = range(max(map(len, columns)))
    return tuple(merge([each[row] if row < len(each) else None for each in columns], spans) for row in rows)


def _mean(values: Sequence[Any], spans: Sequence[float]) -> Any:
    known = [(value, span) for value, span in zip(values, spans, strict=True) if value is not None]
    total = sum(span for _, span in known)
    return sum(value * span for value, span in known) / total if total else None


def _most(values: Sequence[Any], _spans: Sequence[float]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _last(values: Sequence[Any], _spans: Sequence[float]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)
