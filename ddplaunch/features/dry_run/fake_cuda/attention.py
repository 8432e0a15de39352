"""Attention: CUDA's kernels are run by the CPU's, also for sharded tensors, and FlexAttention has a backward pass.

Runs in a worker of a dry run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend

from ddplaunch.features.dry_run.fake_cuda.patching import when_imported, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

_FLEX = "torch.nn.attention.flex_attention"
_library: list[torch.library.Library] = []
"""Kernels are registered as long as their library exists."""


def install() -> None:
    wrap("torch.nn.attention.sdpa_kernel", _allow_math_kernel)
    wrap("torch.backends.cuda.enable_math_sdp", lambda enable, _enabled: enable(True))
    wrap("torch.nn.functional.scaled_dot_product_attention", _attention)
    # Its check refuses gradients on the CPU, but its eager form has them.
    when_imported(_FLEX, lambda: wrap(f"{_FLEX}._validate_device", lambda *_: None))
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_flash_attention", _flash, "CPU")  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "CPU")  # type: ignore[no-untyped-call]
    _library.append(library)


def _allow_math_kernel(original: Callable[..., Any], backends: Any, **kwargs: Any) -> Any:
    """Allow also the math kernel: the CPU has no equivalent for some CUDA kernels."""
    chosen = backends if isinstance(backends, (list, tuple)) else [backends]
    return original([*chosen, SDPBackend.MATH], **kwargs)


def _attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not _is_sharded(args, kwargs):
        return original(*args, **kwargs)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return _sharded_attention(original, **dict(zip(names, args, strict=False)), **kwargs)


def _is_sharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(each, module.DTensor) for each in (*args, *kwargs.values()))


def _sharded_attention(original: Callable[..., Any], query: Any, key: Any, value: Any, **options: Any) -> Any:
    """As on GPUs: the flash kernel, whose sharding torch knows, for what it can do; else the operations it consists of.

    Context parallelism replaces the flash kernel; other operations would see its tokens in another order.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import implicit_replication

    flash = torch.ops.aten._scaled_dot_product_flash_attention
    is_replaced = flash.default in DTensor._op_dispatcher._custom_op_handlers
    needs_more = (options.get("attn_mask") is not None, options.get("dropout_p"), options.get("enable_gqa"))
    if is_replaced or not any(needs_more):
        dropout, is_causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
        return flash(query, key, value, dropout, is_causal, scale=options.get("scale"))[0]
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH), implicit_replication():
        return original(query, key, value, **options)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """CUDA's kernel, by the CPU's; what only its backward kernel on a GPU reads is empty."""
    if dropout_p:
        raise NotImplementedError("flash attention with dropout is not available from the 'CPU' backend")
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = on_cpu(query, key, value, dropout_p, is_causal, scale=scale)
    empty = torch.zeros((), dtype=torch.int64)
    return output, logsumexp, empty, empty, query.size(2), key.size(2), empty, empty, empty


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    *others: Any,
    scale: float | None = None,
) -> Any:
    _cumulative_q, _cumulative_k, _max_q, _max_k, dropout_p, is_causal = others[:6]
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return on_cpu(gradient, query, key, value, output, logsumexp, dropout_p, is_causal, scale=scale)
