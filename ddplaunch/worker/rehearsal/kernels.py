"""Code for GPUs that the script brings along: it is refused where it would be built or started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.worker.rehearsal.refusal import refusing
from ddplaunch.worker.rehearsal.stand_ins import replace, when_imported, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

_EXTENSIONS = "torch.utils.cpp_extension"
_TRITON = "triton.runtime.jit"


def install() -> None:
    when_imported(_EXTENSIONS, _watch_extensions)
    when_imported(_TRITON, lambda: replace(f"{_TRITON}.JITFunction.run", _refuse_kernel))


def _watch_extensions() -> None:
    refuse = refusing(f"{_EXTENSIONS} with CUDA sources")

    def load(original: Callable[..., Any], name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else sources
        if kwargs.get("with_cuda") or any(str(file).endswith((".cu", ".cuh")) for file in files):
            refuse()
        return original(name, sources, *args, **kwargs)

    def load_inline(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or kwargs.get("cuda_sources") or (len(args) > 2 and args[2]):
            refuse()
        return original(*args, **kwargs)

    wrap(f"{_EXTENSIONS}.load", load)
    wrap(f"{_EXTENSIONS}.load_inline", load_inline)


def _refuse_kernel(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    refusing(f"Triton kernel {getattr(self, '__name__', '')}")()
