"""Gathers what NCCL and the GPU driver of this node know about a job that stands still.

Runs in the agent, in any thread but the main one: it blocks for seconds. Changes nothing but short-lived threads and a
child process of ``nvml``.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from ddplaunch.protocol.hang_evidence import MAX_GPUS, MAX_RAS_CHARS, Gpu, NodeEvidence
from ddplaunch.system.gpus import nccl_ras, nvml

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddplaunch.system.gpus.nvml import GpuActivity

_MARGIN_S = 0.5
"""Both sources end by themselves before the limit, unless the name in NCCL_RAS_ADDR must be looked up."""

_Found = TypeVar("_Found")


def gather(host: str, ras_address: str, devices: Collection[str] | None, limit_s: float) -> NodeEvidence:
    """The evidence of this node, named ``host``, within ``limit_s`` seconds; raises nothing.

    Args:
        host: display name of the node.
        ras_address: ``Placement.ras_address``; empty: NCCL is not asked.
        devices: indices or UUIDs of the GPUs of the job, as in CUDA_VISIBLE_DEVICES; None: all of this machine.
        limit_s: after this time, a source that has not answered is missing.
    """
    deadline = time.monotonic() + limit_s
    own_limit_s = limit_s - min(_MARGIN_S, limit_s / 4)
    late = f"no answer within {limit_s:g} s, or no room for a thread that asks"
    no_gpus: tuple[tuple[Gpu, ...], str] = ((), late)
    ras = started("nccl ras", ("", late), lambda: _ras(ras_address, own_limit_s))
    gpus = started("nvml", no_gpus, lambda: _gpus(devices, min(nvml.LIMIT_S, own_limit_s)))
    (text, ras_missing), (found, gpus_missing) = ras(deadline), gpus(deadline)
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
    answer, missing = nccl_ras.ask(address, limit_s)
    if answer is None:
        return "", missing
    return answer.text[:MAX_RAS_CHARS], "" if answer.is_complete and len(
        answer.text
    ) <= MAX_RAS_CHARS else "the answer of NCCL's RAS is cut"


def _gpus(devices: Collection[str] | None, limit_s: float) -> tuple[tuple[Gpu, ...], str]:
    if not nvml.is_installed():
        return (), "this node has no GPU of NVIDIA"
    gpus, missing = nvml.gpu_activity(limit_s)
    found = (gpu for gpu in gpus if devices is None or _is_one_of(gpu, devices))
    return tuple(Gpu(**asdict(gpu)) for gpu in islice(found, MAX_GPUS)), missing


def throttled(device: str) -> str:
    """Why the clock of one GPU, named as in CUDA_VISIBLE_DEVICES, is lowered; empty if it is not, or unknown."""
    gpus, _ = _gpus((device,), nvml.LIMIT_S)
    return next((gpu.throttled for gpu in gpus), "")


def _is_one_of(gpu: GpuActivity, devices: Collection[str]) -> bool:
    """CUDA accepts the begin of a UUID, too."""
    return str(gpu.index) in devices or any(gpu.uuid.startswith(name) for name in devices if not name.isdigit())
