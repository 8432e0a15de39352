"""``ddplaunch.launch`` with a function. Runs in the user's process, in the thread that calls it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddplaunch.cli.python_api import configuration
from ddplaunch.config import NO_LOGS
from ddplaunch.errors import UsageError
from ddplaunch.features.functions import function_call
from ddplaunch.launcher import launch as launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddplaunch.protocol.results import FunctionResult

_NOT_FOR_FUNCTIONS = ("module", "no_python", "run_path", "pass_local_rank", "use_env")


def launch(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    stdout_fd: int,
    options: dict[str, Any],
) -> FunctionResult:
    """Have all workers call ``function``; arguments and errors are those of ``ddplaunch.launch``."""
    for name in _NOT_FOR_FUNCTIONS:
        if options.get(name):
            raise UsageError(f"{name}: not for a function")
    config = configuration(function_call.source_file(function), (), options)
    if config.output.log_dir == NO_LOGS:
        raise UsageError("--log-dir /dev/null: what a function returns is written to the run folder")
    if config.python:
        raise UsageError("PYTHON_EXEC: a function runs with the interpreter of ddplaunch", "Unset PYTHON_EXEC.")
    text = function_call.encoded(function, args, kwargs)
    config = replace(config, entry="function", text=text)
    return function_call.with_values(launcher.launch(config, stdout_fd), config)
