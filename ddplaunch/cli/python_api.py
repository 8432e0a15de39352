"""``ddplaunch.launch``: a run from Python, with the words of the command line as keyword arguments.

Runs in the user's process, in the thread that calls it. Loads click only for keyword arguments; must not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from ddplaunch import features
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import UsageError
from ddplaunch.launcher import launch as launcher

if TYPE_CHECKING:
    from ddplaunch.protocol.run_result import FunctionResult, RunResult


_ELASTIC = {"run_id": "rdzv_id", "rdzv_configs": "rdzv_conf", "min_nodes": "nnodes", "max_nodes": "nnodes"}
"""Names of torch.distributed.launcher.api.LaunchConfig that are not those of torchrun's options."""

_HINTS = {
    "detach": "A run of launch is a part of this process; subprocess.run(['ddplaunch', '--detach', ...]) is not.",
    **{name: f"Did you mean {meant}?" for name, meant in _ELASTIC.items()},
}
_HINT_NAMES = "Names are those of docs/options.md, with _."


@overload
def launch(target: LaunchConfig, *, stdout_fd: int = 1) -> RunResult: ...
@overload
def launch(
    target: str | os.PathLike[str], args: Sequence[object] = (), *, stdout_fd: int = 1, **options: Any
) -> RunResult: ...
@overload
def launch(
    target: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    stdout_fd: int = 1,
    **options: Any,
) -> FunctionResult: ...
def launch(
    target: LaunchConfig | str | os.PathLike[str] | Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    stdout_fd: int = 1,
    **options: Any,
) -> RunResult:
    """Run a job and return its result. Then all its processes have ended, except the result's ``unkillable_pids``.

    In the main thread, signals are handled as by the command until ``launch`` returns; in another thread they are not
    handled.

    Args:
        target: the script, or a function that every worker calls, or a configuration, which has all settings.
        args: arguments of the script or function.
        kwargs: keyword arguments of the function.
        stdout_fd: the workers' stdout goes to this descriptor.
        options: the options of the command, with ``_`` for ``-``: ``nproc_per_node=4``, ``max_restarts=3``.

    Returns:
        The result; for a function a ``FunctionResult``, with what it has returned on each rank.

    Raises:
        UsageError: an invalid option, or a function or an argument that cannot be sent to workers.
        LaunchError: the job could not be started, or an agent was lost.
    """
    _refuse_in_worker()
    if isinstance(target, LaunchConfig):
        if args or kwargs or options:
            raise UsageError("a LaunchConfig has all settings: give no other arguments but stdout_fd")
        from ddplaunch.cli.build_config import checked

        return launcher.launch(checked(target), stdout_fd)
    if callable(target):
        for module in features.modules("target"):
            result: FunctionResult = module.launch(target, args, kwargs or {}, stdout_fd, options)
            return result
        raise UsageError("workers of this installation run no functions, only scripts")
    if kwargs:
        raise UsageError("kwargs are for a function; a script gets args")
    return launcher.launch(configuration(os.fspath(target), args, options), stdout_fd)


def _refuse_in_worker() -> None:
    """Raise UsageError while a worker imports the script that calls ``launch``: it would start jobs without end."""
    process = sys.modules.get("multiprocessing.process")
    if process and getattr(process.current_process(), "_inheriting", False):
        hint = 'Put the call under `if __name__ == "__main__":`, as for multiprocessing.'
        raise UsageError("launch was called while a worker imports the script", hint)


def configuration(script: str, args: Sequence[object], options: Mapping[str, Any]) -> LaunchConfig:
    """The configuration that the command would make of these options, without PET_* and without a scheduler."""
    import click

    from ddplaunch.cli.build_config import build_config
    from ddplaunch.cli.commands import OF_COMMANDS
    from ddplaunch.cli.main import command

    known = {param.name: param for param in command.params if isinstance(param, click.Option) and param.expose_value}
    words = {**({"cluster": "none"} if "cluster" in known else {}), **options}
    for name in words:
        if name not in known or name in OF_COMMANDS:
            raise UsageError(f"launch has no option {name}", _HINTS.get(name) or _hint(name, known))
    spelled = [token for name, value in words.items() for token in _tokens(known[name], value)]
    context = click.Context(command)
    try:
        click.Command.parse_args(command, context, [*spelled, "--", script, *map(str, args)])
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
    return build_config(context.params, os.environ)


def _hint(name: str, known: Mapping[str, Any]) -> str:
    from ddplaunch.cli.commands import OF_COMMANDS
    from ddplaunch.cli.parser import similar

    meant = similar(name, [word for word in known if word not in OF_COMMANDS])
    return f"Did you mean {' or '.join(meant)}?" if meant else _HINT_NAMES


def _tokens(option: Any, value: object) -> list[str]:
    """The option as on a command line; nothing for None, or for a flag that is false."""
    name = max(option.opts, key=len)
    if value is None or (option.is_flag and value is False):
        return []
    if option.is_flag != (value is True):
        raise UsageError(f"{name} {value!r}: must be {'True or False' if option.is_flag else 'a value'}")
    if option.is_flag:
        return [name]
    return [f"{name}={_text(part)}" for part in (_parts(value) if option.multiple else (value,))]


def _parts(value: object) -> Sequence[object]:
    """Several values of one option: a list, or names and values."""
    if isinstance(value, Mapping):
        return [f"{key}={item}" for key, item in value.items()]
    return [value] if isinstance(value, str) or not isinstance(value, Sequence) else value


def _text(value: object) -> str:
    """``value`` as on a command line: lists with commas, and dicts as NAME=VALUE."""
    if isinstance(value, Mapping):
        return ",".join(_parts(value))  # type: ignore[arg-type]
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, set, frozenset)) else str(value)
