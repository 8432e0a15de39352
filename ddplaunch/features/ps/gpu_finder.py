"""The GPUs of this machine, what the driver says of them, and the runs of all users that use them or wait for some.

Runs in an agent without a run, which answers ``ListGpus``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

from ddplaunch.features.free_gpus import choice, register
from ddplaunch.features.free_gpus.records import GpuUser
from ddplaunch.features.gpus import reader
from ddplaunch.features.ps.queries import GpuOnHost, GpusFound, ListGpus
from ddplaunch.features.ps.run_finder import machine

if TYPE_CHECKING:
    from ddplaunch.agent.launcher_channel import Outbox
    from ddplaunch.features.gpus.records import GpuReading

_READ_S = 20.0


def serve(_query: ListGpus, _stream: BinaryIO, outbox: Outbox) -> tuple[int, ...]:
    """Send GpusFound."""
    read, users = reader.read_once("health", _READ_S), list[GpuUser]()
    problem = read.missing and f"nobody knows what the GPUs do: {read.missing}"
    try:
        users = register.listed()
    except OSError as error:
        problem = f"nobody knows which runs use GPUs: {register.folder()}: {error.strerror}"
    outbox.send(GpusFound(machine(), tuple(map(_on_host, read.gpus)), tuple(users), problem))
    return ()


def _on_host(gpu: GpuReading) -> GpuOnHost:
    return GpuOnHost(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        is_mig=gpu.is_mig,
        key=choice.key_of(str(gpu.index)),
        used_bytes=gpu.used_bytes or 0,
        in_use=choice.in_use(gpu),
    )
