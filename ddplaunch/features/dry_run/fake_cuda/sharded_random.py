"""Random numbers of sharded tensors: shards differ, and replicas are equal, as on GPUs.

Runs in a worker of a dry run. On a GPU every rank uses its part of one sequence of numbers, by an offset into it. The
CPU's generator has no offset: a seed is drawn from it, and each shard has its own sequence.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddplaunch.features.dry_run.fake_cuda.patching import replace, when_imported

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULE = "torch.distributed.tensor._random"


def install() -> None:
    when_imported(_MODULE, _patch)


def _patch() -> None:
    replace(f"{_MODULE}.is_rng_supported_mesh", lambda device_mesh: True)
    replace(f"{_MODULE}.OffsetBasedRNGTracker.__init__", _init)
    replace(f"{_MODULE}.OffsetBasedRNGTracker._distribute_region", _distribute_region)


def _init(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
    self._device, self._device_handle, self._use_distribute_region = torch.device("cpu"), torch.cuda, True
    if run_state_sync:
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)


@contextlib.contextmanager
def _distribute_region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
    """Let the block draw numbers for one shard. Afterwards the generator's state is equal on all ranks."""
    used = generator or torch.default_generator
    if not self._use_distribute_region:
        yield
        return
    seed = int(torch.randint(1 << 62, (), generator=used))
    state = used.get_state()
    used.manual_seed(seed + _shard(spec))
    try:
        yield
    finally:
        used.set_state(state)


def _shard(spec: Any) -> int:
    """Number of this rank's shard: equal on ranks with the same part of the tensor."""
    coordinate, number = spec.mesh.get_coordinate() or (), 0
    for index, placement, size in zip(coordinate, spec.placements, spec.mesh.shape, strict=False):
        if not (placement.is_replicate() or placement.is_partial()):
            number = number * size + index
    return number
