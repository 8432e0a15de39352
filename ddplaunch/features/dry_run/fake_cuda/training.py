"""Optimizers, compiler, profilers and autocast: settings for CUDA also apply to the CPU.

Runs in a worker of a dry run. ``torch.compile`` returns functions unchanged, except with ``compile_on_cpu``. GPU
profilers record nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ddplaunch.features.dry_run.fake_cuda.patching import replace, wrap


def install(compile_on_cpu: bool) -> None:
    _install_profilers()
    _install_autocast()
    # The CPU supports `foreach=True` and `capturable=True`, though torch does not choose them there.
    wrap("torch.utils._foreach_utils._device_has_foreach_support", lambda _original, _device: True)
    wrap("torch.optim.optimizer._get_capturable_supported_devices", _with_cpu)
    wrap("torch.compiler.cudagraph_mark_step_begin", lambda _original: None)
    # Compiled code of torch >= 2.15 calls this C++ function instead of torch.accelerator.
    wrap(
        "torch._C._dynamo.utils.get_current_stream", lambda _original, device: torch.accelerator.current_stream(device)
    )
    if not compile_on_cpu:
        wrap("torch.compile", _run_eagerly)


def _with_cpu(original: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
    return [*original(*args, **kwargs), "cpu"]


def _run_eagerly(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.compiler.set_stance("force_eager")
    # `mode` and `options` make the default backend prepare for GPUs before anything is compiled.
    given = {name: value for name, value in kwargs.items() if name not in ("mode", "options")}
    return original(*args, **{**given, "backend": "eager"})


class _FakeNvtx:
    """Replaces the NVTX library: every call succeeds and has no effect."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: 0


def _install_profilers() -> None:
    """NVTX calls and switches have no effect, torch's profiler records the CPU."""
    replace("torch.cuda.nvtx._nvtx", _FakeNvtx(), everywhere=False)
    wrap("torch.autograd.profiler.profile.__init__", _without_gpu)
    wrap("torch.autograd.profiler.emit_nvtx.__init__", lambda original, self, **_kwargs: original(self, enabled=False))
    for name in ("_record_memory_history", "_dump_snapshot"):
        wrap(f"torch.cuda.memory.{name}", lambda _original, *_args, **_kwargs: None)
    wrap("torch.cuda.memory._snapshot", lambda _original, *_args, **_kwargs: {"segments": [], "device_traces": []})


def _without_gpu(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    given = {name: value for name, value in kwargs.items() if name != "use_cuda"}
    original(self, *args, **{**given, "use_device": None})


# Autocast for GPUs on the CPU: which operations run in float32, and which in the type of autocast, are CUDA's rules.
# The CPU's own rules are fewer: under them a softmax of bfloat16 stays bfloat16, and `scatter_add` of two types raises
# an error. ``torch.autocast("cpu")`` keeps the CPU's rules.

_CPU_KEY = "AutocastCPU"
_AFTER_CPU_KEY = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
_LOW = "addmv addr mv lstm.input gru.input rnn_tanh.input rnn_relu.input"
_LOW += " lstm.data gru.data rnn_tanh.data rnn_relu.data lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put scatter_add tensordot"
_FLOAT32 = "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh softplus tan"
_FLOAT32 += " pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor cumprod cumsum sum sum.dim_IntList logsumexp"
_FLOAT32 += " softmax.int log_softmax.int layer_norm native_layer_norm group_norm rms_norm renorm"
_FLOAT32 += " norm.Scalar norm.ScalarOpt_dim frobenius_norm.dim nuclear_norm nuclear_norm.dim linalg_vector_norm"
_FLOAT32 += " linalg_matrix_norm linalg_matrix_norm.str_ord cosine_similarity dist pdist"
_FLOAT32 += " upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"
_FLOAT32 += " upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d"
_FLOAT32 += " _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"

_of_cpu = threading.local()
"""``settings``: whether autocast for the CPU was on before that for CUDA, and its type."""

_libraries: list[torch.library.Library] = []
"""Kernels are registered as long as their library exists."""


def _install_autocast() -> None:
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        wrap(f"torch.{name}", _set_for_cuda_and_cpu)
    wrap("torch.set_autocast_gpu_dtype", lambda _original, dtype: torch.set_autocast_dtype("cuda", dtype))
    wrap("torch._C._nn.binary_cross_entropy", _binary_cross_entropy)
    wrap("torch.amp.autocast_mode._cast", lambda cast, value, device, dtype: cast(value, "cpu", dtype))


def _set_for_cuda_and_cpu(original: Callable[..., Any], *args: Any) -> None:
    """While autocast for CUDA is on, its settings are also the CPU's, where the tensors are; then the CPU's return."""
    device, value = args if len(args) == 2 else ("cuda", *args)
    was_enabled = torch.is_autocast_enabled("cuda")
    if device == "cuda" and value is True and not was_enabled:
        _of_cpu.settings = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    original(device, value)
    is_enabled = torch.is_autocast_enabled("cuda")
    if device == "cuda" and (is_enabled or was_enabled):
        of_cpu = getattr(_of_cpu, "settings", (False, torch.bfloat16))  # A thread may have been started in the block.
        enabled, dtype = (True, torch.get_autocast_dtype("cuda")) if is_enabled else of_cpu
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
        if is_enabled and not _libraries:
            _register()
        if is_enabled != was_enabled and of_cpu[0]:
            torch.clear_autocast_cache()  # It has weights in the other type.


def _binary_cross_entropy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """CUDA refuses it under autocast: the logarithm of a float16 probability may be infinite."""
    if torch.is_autocast_enabled("cuda"):
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; "
            "use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss"
        )
    return original(*args, **kwargs)


def _register() -> None:
    """Add CUDA's rules for operations for which the CPU has none. For those of both, the rules are the same."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for names, chosen in ((_LOW, _low), (_WIDEST, _widest), (_FLOAT32, _float32)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operator and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _CPU_KEY):
                library.impl(name, functools.partial(_cast_and_call, operator, chosen), _CPU_KEY, with_keyset=True)  # type: ignore[no-untyped-call]


def _cast_and_call(operator: Any, chosen: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_autocast_enabled("cuda"):
        return operator.redispatch(keys & _AFTER_CPU_KEY, *args, **kwargs)  # As without this kernel.
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        # A type that the script chose for the result is that of the computation, too.
        if kwargs.get("dtype") is None:
            to = chosen((args, kwargs))
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: _cast(tensor, to), (args, kwargs))
        return operator(*args, **kwargs)


def _cast(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    return tensor.to(to) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def _low(_values: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _float32(_values: Any) -> torch.dtype:
    return torch.float32


def _widest(values: Any) -> torch.dtype:
    """The type of autocast, or float32 if one of the tensors has it."""
    types: set[torch.dtype] = set()
    tree_map_only(torch.Tensor, lambda tensor: types.add(tensor.dtype), values)
    return torch.float32 if torch.float32 in types else torch.get_autocast_dtype("cuda")
