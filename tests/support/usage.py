"""Usage samples for tests."""

from __future__ import annotations

from ddplaunch.features.usage.records import GpusUsage, NodeUsage, UsageSample, WorkersUsage


def sample(at_s: float = 0.0, span_s: float = 2.0, value: float = 1.0, workers: int = 2, gpus: int = 0) -> UsageSample:
    """A sample in which everything has this value."""
    of_workers, of_gpus = (value,) * workers, (value,) * gpus
    return UsageSample(
        at_s=at_s,
        span_s=span_s,
        node=NodeUsage(cpu=value, mem=value, disk=value, rx=value, tx=value),
        workers=WorkersUsage(
            cpu=of_workers, rss=of_workers, rd=of_workers, wr=of_workers, quiet=of_workers, lines=of_workers
        ),
        gpus=GpusUsage(util=of_gpus, mem=of_gpus, power=of_gpus, temp=of_gpus, throttle=(None,) * gpus)
        if gpus
        else None,
    )
