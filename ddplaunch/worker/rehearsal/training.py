"""Mixed precision, optimizers, attention, compiler: CUDA's choices drive the CPU's, compiled code runs as written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import attention

from ddplaunch.worker.rehearsal.stand_ins import wrap

if TYPE_CHECKING:
    from collections.abc import Callable


def install(compiles: bool) -> None:
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        wrap(f"torch.{name}", _for_both)
    wrap("torch.set_autocast_gpu_dtype", lambda _original, dtype: torch.set_autocast_dtype("cuda", dtype))
    wrap("torch.amp.autocast_mode._cast", lambda cast, value, device, dtype: cast(value, "cpu", dtype))
    wrap("torch.nn.attention.sdpa_kernel", _with_math)
    wrap("torch.backends.cuda.enable_math_sdp", lambda enable, _enabled: enable(True))
    # What is asked for by `foreach=True` and `capturable=True` the CPU can do, and only would not choose by itself.
    wrap("torch.utils._foreach_utils._device_has_foreach_support", lambda _original, _device: True)
    wrap("torch.optim.optimizer._get_capturable_supported_devices", _and_cpu)
    wrap("torch.compiler.cudagraph_mark_step_begin", lambda _original: None)
    # What compiled code of torch >= 2.15 asks in C++, where before it was torch.accelerator.
    wrap(
        "torch._C._dynamo.utils.get_current_stream", lambda _original, device: torch.accelerator.current_stream(device)
    )
    if not compiles:
        wrap("torch.compile", _eager)


def _for_both(original: Callable[..., Any], *args: Any) -> None:
    """CUDA's setting is kept for those who ask for it; the CPU's is what the tensors meet."""
    device, value = args if len(args) == 2 else ("cuda", *args)
    original(device, value)
    if device == "cuda":
        # Off again, the CPU has the type it always starts with.
        is_type_at_rest = isinstance(value, torch.dtype) and not torch.is_autocast_enabled("cuda")
        original("cpu", torch.bfloat16 if is_type_at_rest else value)


def _with_math(original: Callable[..., Any], backends: Any, **kwargs: Any) -> Any:
    """The CPU has no other kernel for some of CUDA's."""
    chosen = backends if isinstance(backends, (list, tuple)) else [backends]
    return original([*chosen, attention.SDPBackend.MATH], **kwargs)


def _and_cpu(original: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
    return [*original(*args, **kwargs), "cpu"]


def _eager(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.compiler.set_stance("force_eager")
    # The default backend prepares itself for GPUs, as its modes and options say, before anything is compiled.
    given = {name: value for name, value in kwargs.items() if name not in ("mode", "options")}
    return original(*args, **{**given, "backend": "eager"})
