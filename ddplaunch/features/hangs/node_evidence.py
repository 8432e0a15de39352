"""Gathers what NCCL and the GPU driver of this node know about a job that stands still.

Runs in the agent, in any thread but the main one: it blocks for seconds. Changes nothing but short-lived threads and a
child process that reads GPUs.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

from ddplaunch.agent import gpu_reader
from ddplaunch.features.hangs import nccl_ras
from ddplaunch.features.hangs.records import MAX_RAS_CHARS, NodeEvidence
from ddplaunch.system.gpus import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddplaunch.protocol.gpus import GpuReading

_MARGIN_S = 0.5
"""Both sources end by themselves before the limit, unless the name in NCCL_RAS_ADDR must be looked up."""

_Found = TypeVar("_Found")


def gather(host: str, ras_address: str, gpus: Collection[str] | None, limit_s: float) -> NodeEvidence:
    """The evidence of this node, named ``host``, within ``limit_s`` seconds; raises nothing.

    Args:
        host: display name of the node.
        ras_address: where NCCL's RAS listens; empty: NCCL is not asked.
        gpus: indices or UUIDs of the GPUs of the job, as in CUDA_VISIBLE_DEVICES; None: all of this machine.
        limit_s: after this time, a source that has not answered is missing.
    """
    deadline = time.monotonic() + limit_s
    own_limit_s = limit_s - min(_MARGIN_S, limit_s / 4)
    late = f"no answer within {limit_s:g} s, or no room for a thread that asks"
    no_gpus: tuple[tuple[GpuReading, ...], str] = ((), late)
    ras = started("nccl ras", ("", late), lambda: _ras(ras_address, own_limit_s))
    nvml_limit_s = min(devices.NVML_LIMIT_S, own_limit_s)
    read = started("nvml", no_gpus, lambda: _gpus(gpus, nvml_limit_s))
    (text, ras_missing), (found, gpus_missing) = ras(deadline), read(deadline)
    return NodeEvidence(host=host, ras=text, ras_missing=ras_missing, gpus=found, gpus_missing=gpus_missing)


def started(name: str, otherwise: _Found, find: Callable[[], _Found]) -> Callable[[float], _Found]:
    """Call ``find`` in a thread. The result waits until a deadline for what it returns, and is ``otherwise`` after.

    It is also ``otherwise`` where there is no room for a thread.
    """
    found: list[_Found] = []
    thread = threading.Thread(target=lambda: found.append(find()), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return lambda _: otherwise

    def result(deadline: float) -> _Found:
        thread.join(max(0.0, deadline - time.monotonic()))
        return found[0] if found else otherwise

    return result


def _ras(address: str, limit_s: float) -> tuple[str, str]:
    if not address:
        return "", "NCCL was not asked: this node has no GPU of NVIDIA, or NCCL's RAS is turned off"
    text, missing = nccl_ras.ask(address, limit_s)
    return text[:MAX_RAS_CHARS], nccl_ras.CUT if len(text) > MAX_RAS_CHARS else missing


def _gpus(names: Collection[str] | None, limit_s: float) -> tuple[tuple[GpuReading, ...], str]:
    if not devices.has_nvml():
        return (), "this node has no GPU of NVIDIA"
    read = gpu_reader.read_once("activity", limit_s)
    return tuple(gpu for gpu in read.gpus if names is None or any(map(gpu.is_named, names))), read.missing


def throttled(device: str) -> str:
    """Why the clock of one GPU, named as in CUDA_VISIBLE_DEVICES, is lowered; empty if it is not, or unknown."""
    gpus, _ = _gpus((device,), devices.NVML_LIMIT_S)
    return next((gpu.throttled for gpu in gpus), "")
