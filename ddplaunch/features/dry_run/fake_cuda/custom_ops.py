"""Operators that Python code defines: a kernel that is registered for CUDA also runs on the CPU, unless it has its own.

Runs in a worker of a dry run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.library

from ddplaunch.features.dry_run.fake_cuda.patching import wrap

if TYPE_CHECKING:
    from collections.abc import Callable

_TORCHS_OWN = ("aten", "prims")


def install() -> None:
    # torch.library.impl and torch.library.custom_op call it, too.
    wrap("torch.library.Library.impl", _register)


def _register(
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
