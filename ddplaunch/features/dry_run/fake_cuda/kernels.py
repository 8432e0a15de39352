"""Kernels of the script, and of attention. An operator that Python code registers for CUDA runs on the CPU, too.

CUDA sources and Triton kernels are unsupported when they are built or started. CUDA's attention is run by the CPU's
kernels, also for sharded tensors, and FlexAttention has a backward pass. Runs in a worker of a dry run; patches
``torch.utils.cpp_extension`` and Triton when the script imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.library
from torch.nn.attention import SDPBackend

from ddplaunch.features.dry_run.fake_cuda.patching import replace, when_imported, wrap
from ddplaunch.features.dry_run.fake_cuda.unsupported import unsupported_function

_EXTENSIONS = "torch.utils.cpp_extension"
_TRITON, _TUNER = "triton.runtime.jit", "triton.runtime.autotuner"
_TORCHS_OWN = ("aten", "prims")


def install() -> None:
    _install_attention()
    when_imported(_EXTENSIONS, _patch_extensions)
    when_imported(_TRITON, lambda: replace(f"{_TRITON}.JITFunction.run", _exit_at_kernel))
    when_imported(_TUNER, lambda: replace(f"{_TUNER}.Autotuner.run", _exit_at_kernel))
    _install_out_dtype()
    # torch.library.impl and torch.library.custom_op call it, too.
    wrap("torch.library.Library.impl", _register_for_cpu)


def _patch_extensions() -> None:
    exit_worker = unsupported_function(f"{_EXTENSIONS} with CUDA sources")

    def load(original: Callable[..., Any], name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else sources
        if kwargs.get("with_cuda") or any(str(file).endswith((".cu", ".cuh")) for file in files):
            exit_worker()
        return original(name, sources, *args, **kwargs)

    def load_inline(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or kwargs.get("cuda_sources") or (len(args) > 2 and args[2]):
            exit_worker()
        return original(*args, **kwargs)

    wrap(f"{_EXTENSIONS}.load", load)
    wrap(f"{_EXTENSIONS}.load_inline", load_inline)


def _exit_at_kernel(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    kernel = self
    while hasattr(kernel, "fn"):  # Of a tuner, of its heuristics, and the function itself.
        kernel = kernel.fn
    code = getattr(kernel, "__code__", None)
    place = f" of {code.co_filename}:{code.co_firstlineno}" if code else ""
    unsupported_function(f"Triton kernel {getattr(kernel, '__name__', '')}{place}")()


def _register_for_cpu(
    original: Callable[..., None], self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any
) -> None:
    original(self, op_name, fn, dispatch_key, **kwargs)
    if (dispatch_key or self.dispatch_key) != "CUDA" or self.ns in _TORCHS_OWN:
        return
    name = (op_name if isinstance(op_name, str) else op_name.name()).split("::")[-1]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{self.ns}::{name}", "CPU"):
        original(self, op_name, fn, "CPU", **kwargs)
        # The script may register a kernel for the CPU later.
        torch.library._impls.discard(f"{self.ns}/{name}/CPU")


def _install_out_dtype() -> None:
    """Products of matrices with ``out_dtype``, which torch has for GPUs only: the CPU computes in that type."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        product = getattr(torch, name)

        def compute(*tensors: Any, product: Any = product, **scales: Any) -> Any:
            *operands, out_dtype = tensors
            return product(*(operand.to(out_dtype) for operand in operands), **scales)

        def compute_into(*tensors: Any, out: Any, compute: Any = compute, **scales: Any) -> Any:
            return out.copy_(compute(*tensors, **scales))

        for overload, kernel in (("dtype", compute), ("dtype_out", compute_into)):
            if hasattr(getattr(torch.ops.aten, name), overload):
                library.impl(f"{name}.{overload}", kernel, "CPU")  # type: ignore[no-untyped-call]
    _library.append(library)


# Attention.

_FLEX = "torch.nn.attention.flex_attention"
_library: list[torch.library.Library] = []
"""Kernels are registered as long as their library exists."""


def _install_attention() -> None:
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
