"""ddplaunch: start, supervise and explain PyTorch DDP jobs, in place of torchrun.

The names below are the Python API; each is loaded on first use, so importing the package is cheap. A script may call
``give_up`` and ``avoid_this_node``; the others start jobs::

    from ddplaunch import launch

    result = launch("train.py", ["--lr", "1e-3"], nproc_per_node=4, max_restarts=1)
    print(result.outcome, result.exit_code)
"""

from __future__ import annotations

from ddplaunch.version import __version__

# Not from typing: before ``__main__`` runs, the working directory of ``python -m ddplaunch`` may hide modules.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddplaunch.cli.python_api import launch
    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import LaunchConfig, OutputConfig, RemoteConfig, RendezvousConfig, Streams, WorkerConfig
    from ddplaunch.errors import JobFailed, LaunchError, UsageError
    from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
    from ddplaunch.protocol.run_result import FunctionResult, RunResult
    from ddplaunch.timeouts import TimeoutConfig
    from ddplaunch.worker.requests import avoid_this_node, give_up

__all__ = [
    "AttemptResult",
    "FunctionResult",
    "Host",
    "JobFailed",
    "LaunchConfig",
    "LaunchError",
    "OutputConfig",
    "RemoteConfig",
    "RendezvousConfig",
    "RunResult",
    "Streams",
    "TimeoutConfig",
    "UsageError",
    "WorkerConfig",
    "WorkerError",
    "WorkerExit",
    "__version__",
    "avoid_this_node",
    "give_up",
    "launch",
]

_CONFIG = (
    "LaunchConfig",
    "OutputConfig",
    "RemoteConfig",
    "RendezvousConfig",
    "Streams",
    "TimeoutConfig",
    "WorkerConfig",
)
_MODULE_OF = {
    **dict.fromkeys(_CONFIG, "ddplaunch.config"),
    **dict.fromkeys(("JobFailed", "LaunchError", "UsageError"), "ddplaunch.errors"),
    **dict.fromkeys(("AttemptResult", "WorkerError", "WorkerExit"), "ddplaunch.protocol.results"),
    **dict.fromkeys(("FunctionResult", "RunResult"), "ddplaunch.protocol.run_result"),
    "Host": "ddplaunch.cluster.hosts",
    "launch": "ddplaunch.cli.python_api",
    **dict.fromkeys(("avoid_this_node", "give_up"), "ddplaunch.worker.requests"),
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
