"""ddplaunch: start, supervise and explain PyTorch DDP jobs, in place of torchrun.

``from ddplaunch import LaunchConfig, launch`` is the Python API; names load on first use, so that the import is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LaunchConfig", "LaunchError", "RunResult", "__version__", "launch"]

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.errors import LaunchError
    from ddplaunch.launcher.launching import launch
    from ddplaunch.model import RunResult

_HOME = {
    "LaunchConfig": "ddplaunch.config",
    "LaunchError": "ddplaunch.errors",
    "RunResult": "ddplaunch.model",
    "launch": "ddplaunch.launcher.launching",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
