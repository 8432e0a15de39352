"""Profilers of GPUs see nothing here: what marks or switches is taken in silence, torch's profiler sees the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.worker.rehearsal.stand_ins import replace, wrap

if TYPE_CHECKING:
    from collections.abc import Callable


class _Silent:
    """In the place of the NVTX library: every call is taken and none does anything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: 0


def install() -> None:
    replace("torch.cuda.nvtx._nvtx", _Silent(), everywhere=False)
    wrap("torch.autograd.profiler.profile.__init__", _without_gpu)
    wrap("torch.autograd.profiler.emit_nvtx.__init__", lambda original, self, **_kwargs: original(self, enabled=False))
    for name in ("_record_memory_history", "_dump_snapshot"):
        wrap(f"torch.cuda.memory.{name}", lambda _original, *_args, **_kwargs: None)
    wrap("torch.cuda.memory._snapshot", lambda _original, *_args, **_kwargs: {"segments": [], "device_traces": []})


def _without_gpu(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    given = {name: value for name, value in kwargs.items() if name != "use_cuda"}
    original(self, *args, **{**given, "use_device": None})
