"""Gathers what NCCL and the GPU driver of this node know about a job that stands still.

Runs in the agent, in any thread but the main one: it blocks for seconds. Changes nothing but short-lived threads and a
child process of ``nvml``.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from ddplaunch.protocol.hang_evidence import MAX_GPUS, Gpu, NodeEvidence
from ddplaunch.system import nccl_ras, nvml

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 6.0
_MARGIN_S = 0.5
"""Both sources end by themselves before the limit, unless the name in NCCL_RAS_ADDR must be looked up."""

_Found = TypeVar("_Found")


def gather(host: str, ras_address: str, limit_s: float = LIMIT_S) -> NodeEvidence:
    """The evidence of this node, named ``host``, within ``limit_s`` seconds; raises nothing.

    ``ras_address`` is ``Placement.ras_address``; empty: NCCL is not asked.
    """
    deadline = time.monotonic() + limit_s
    own_limit_s = max(0.1, limit_s - _MARGIN_S)
    late = f"no answer within {limit_s:g} s"
    no_gpus: tuple[tuple[Gpu, ...], str] = ((), late)
    ras = _started("nccl ras", ("", late), lambda: _ras(ras_address, own_limit_s))
    gpus = _started("nvml", no_gpus, lambda: _gpus(min(nvml.LIMIT_S, own_limit_s)))
    (text, ras_missing), (found, gpus_missing) = ras(deadline), gpus(deadline)
    return NodeEvidence(host=host, ras=text, ras_missing=ras_missing, gpus=found, gpus_missing=gpus_missing)


def _started(name: str, otherwise: _Found, find: Callable[[], _Found]) -> Callable[[float], _Found]:
    """Call ``find`` in a thread. The result waits until a deadline for what it returns, and is ``otherwise`` after."""
    found: list[_Found] = []
    thread = threading.Thread(target=lambda: found.append(find()), name=name, daemon=True)
    thread.start()

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
    return answer.text, "" if answer.is_complete else "the answer of NCCL's RAS is cut"


def _gpus(limit_s: float) -> tuple[tuple[Gpu, ...], str]:
    if not nvml.is_installed():
        return (), "this node has no GPU of NVIDIA"
    gpus, missing = nvml.gpu_activity(limit_s)
    return tuple(Gpu(**asdict(gpu)) for gpu in gpus[:MAX_GPUS]), missing
