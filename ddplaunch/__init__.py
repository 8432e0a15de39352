"""ddplaunch: start, supervise and explain PyTorch DDP jobs, in place of torchrun.

The names below are the Python API; each is loaded on first use, so importing the package is cheap::

    from ddplaunch import LaunchConfig, WorkerConfig, launch

    result = launch(LaunchConfig(script="train.py", workers=WorkerConfig(nproc_per_node=4), max_restarts=1))
    print(result.outcome, result.exit_code)
"""

from __future__ import annotations

from ddplaunch.version import __version__

# Not from typing: before ``__main__`` runs, the working directory of ``python -m ddplaunch`` may hide modules.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig, OutputConfig, WorkerConfig
    from ddplaunch.errors import LaunchError
    from ddplaunch.launcher.launch import launch
    from ddplaunch.protocol.results import RunResult
    from ddplaunch.timeouts import TimeoutConfig

__all__ = [
    "LaunchConfig",
    "LaunchError",
    "OutputConfig",
    "RunResult",
    "TimeoutConfig",
    "WorkerConfig",
    "__version__",
    "launch",
]

_MODULE_OF = {
    **dict.fromkeys(("LaunchConfig", "OutputConfig", "TimeoutConfig", "WorkerConfig"), "ddplaunch.config"),
    "LaunchError": "ddplaunch.errors",
    "RunResult": "ddplaunch.protocol.results",
    "launch": "ddplaunch.launcher.launch",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULE_OF[name]), name)
