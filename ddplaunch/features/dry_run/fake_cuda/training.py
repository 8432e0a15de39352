"""Optimizers, compiler and profilers: settings for CUDA also apply to the CPU.

Runs in a worker of a dry run. ``torch.compile`` returns functions unchanged, except with ``compile_on_cpu``. GPU
profilers record nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddplaunch.features.dry_run.fake_cuda.patching import replace, wrap


def install(compile_on_cpu: bool) -> None:
    _install_profilers()
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
