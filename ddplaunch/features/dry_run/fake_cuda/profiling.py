"""GPU profilers record nothing: NVTX calls and switches have no effect, torch's profiler records the CPU.

Runs in a worker of a dry run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.features.dry_run.fake_cuda.patching import replace, wrap

if TYPE_CHECKING:
    from collections.abc import Callable


class _FakeNvtx:
    """Replaces the NVTX library: every call succeeds and has no effect."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: 0


def install() -> None:
    replace("torch.cuda.nvtx._nvtx", _FakeNvtx(), everywhere=False)
    wrap("torch.autograd.profiler.profile.__init__", _without_gpu)
    wrap("torch.autograd.profiler.emit_nvtx.__init__", lambda original, self, **_kwargs: original(self, enabled=False))
    for name in ("_record_memory_history", "_dump_snapshot"):
        wrap(f"torch.cuda.memory.{name}", lambda _original, *_args, **_kwargs: None)
    wrap("torch.cuda.memory._snapshot", lambda _original, *_args, **_kwargs: {"segments": [], "device_traces": []})


def _without_gpu(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    given = {name: value for name, value in kwargs.items() if name != "use_cuda"}
    original(self, *args, **{**given, "use_device": None})
