"""GPU code of the script. An operator that Python code registers for CUDA runs on the CPU, too.

CUDA sources and Triton kernels are unsupported when they are built or started. Runs in a worker of a dry run; patches
``torch.utils.cpp_extension`` and Triton when the script imports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.library

from ddplaunch.features.dry_run.fake_cuda.patching import replace, when_imported, wrap
from ddplaunch.features.dry_run.fake_cuda.unsupported import unsupported_function

if TYPE_CHECKING:
    from collections.abc import Callable

_EXTENSIONS = "torch.utils.cpp_extension"
_TRITON = "triton.runtime.jit"
_TORCHS_OWN = ("aten", "prims")


def install() -> None:
    when_imported(_EXTENSIONS, _patch_extensions)
    when_imported(_TRITON, lambda: replace(f"{_TRITON}.JITFunction.run", _exit_at_kernel))
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
    unsupported_function(f"Triton kernel {getattr(self, '__name__', '')}")()


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
