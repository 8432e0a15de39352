"""``torch.cuda`` and ``torch.accelerator``: every public name there is answered, left as it is, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.cuda.comm
import torch.cuda.nccl

from ddplaunch.worker.rehearsal import answers, refusal
from ddplaunch.worker.rehearsal.stand_ins import replace, wrap

if TYPE_CHECKING:
    from types import ModuleType

    from ddplaunch.worker.rehearsal.node import Node

_AS_IT_IS = ("CudaError", "DeferredCudaCallError", "cudaStatus", "caching_allocator_disabled", "device", "device_of")


def install(node: Node) -> None:
    cuda = answers.of_cuda(node)
    _answer_module(torch.cuda, cuda)
    _answer_module(torch.accelerator, answers.of_accelerator(cuda))
    _answer_internals(node)
    for name in [name for name in dir(torch.cuda) if name.endswith("Tensor")]:
        replace(f"torch.cuda.{name}", getattr(torch, name), everywhere=False)
    for module in (torch.cuda.comm, torch.cuda.nccl):
        for name in module.__all__:
            _refuse(f"{module.__name__}.{name}")
    for name in ("_create_jit_fn", "_create_multi_output_jit_fn"):
        _refuse(f"torch.cuda.jiterator.{name}")
    replace("torch.cuda.nccl.version", lambda: (2, 27, 3))
    replace("torch.cuda.nccl.is_available", lambda *_: True)
    replace("torch.Tensor.record_stream", lambda self, stream: None)
    replace("torch.Stream", cuda["Stream"])
    replace("torch.Event", cuda["Event"])
    wrap("torch.get_device_module", lambda original, device=None: torch.cuda if device is None else original(device))


def _answer_module(module: ModuleType, known: dict[str, Any]) -> None:
    for name in module.__all__:
        full, now = f"{module.__name__}.{name}", getattr(module, name, None)
        if name in known:
            _answer(full, known[name])
        elif name in _AS_IT_IS or name.endswith(("Tensor", "Storage")) or not callable(now):
            continue
        elif isinstance(now, type):
            replace(full, refusal.refusing_class(full))
        else:
            _refuse(full)


def _answer(name: str, answer: Any) -> None:
    if isinstance(answer, type) or not callable(answer):
        replace(name, answer)
    else:
        # By a function of its own for each name: torch's compiler keeps them apart by identity.
        wrap(name, lambda _original, *args, **kwargs: answer(*args, **kwargs))


def _refuse(name: str) -> None:
    _answer(name, refusal.refusing(name))


def _answer_internals(node: Node) -> None:
    """What ``torch.cuda.device``, torch's start of CUDA and its extension builder ask below the public names."""

    def exchange(_original: Any, index: int) -> int:
        before = node.current
        if index >= 0:
            node.current = node.index(index)
        return before

    def device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        index = getattr(device, "idx", device)
        return index if isinstance(index, int) else node.index(index)

    wrap("torch.cuda._exchange_device", exchange)
    wrap("torch.cuda._maybe_exchange_device", exchange)
    replace("torch.cuda._utils._get_device_index", device_index)
    replace("torch.cuda._lazy_init", node.use)
    # What builds CUDA sources then finds no compiler for them, also where there is one, and says so.
    replace("torch.cuda._is_compiled", lambda: False)
    replace("torch.backends.cuda.is_built", lambda: True)
    for name in ("preferred_linalg_library", "preferred_blas_library"):
        wrap(f"torch.backends.cuda.{name}", lambda original, *_args, **_kwargs: original())
    replace("torch.backends.cudnn.is_available", lambda: True, everywhere=False)
    replace("torch.backends.cudnn.version", lambda: 91002, everywhere=False)
    replace("torch.version.cuda", torch.version.cuda or "12.8", everywhere=False)
