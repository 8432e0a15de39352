"""Dispatches the commands that come back to a run: ``--attach`` and ``--wait``.

Runs in the process that the user started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.cli.host_options import HOST_OPTIONS
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_COMMANDS = ("attach", "wait")


def popped(options: dict[str, Any]) -> dict[str, str]:
    """Take these commands out of ``options``; returns those that are given, with their run ids."""
    values = {name: options.pop(name) for name in _COMMANDS}
    return {name: value for name, value in values.items() if value is not None}


def run(
    commands: Mapping[str, str], others: Sequence[str], options: Mapping[str, Any], report: Callable[[str], None]
) -> int:
    """Run the only one of ``commands`` and return its exit code.

    Raises:
        UsageError: it cannot be combined with ``others`` or with one of ``options``; or as the command.
        LaunchError: as the command.
    """
    name, *more = commands
    _check(name, [*(f"--{each}" for each in more), *others], options)
    text, log_dir = commands[name], options["log_dir"]
    from ddplaunch.commands import attach

    return attach.wait(text, log_dir) if name == "wait" else attach.attach(text, log_dir, report)


def _check(name: str, others: Sequence[str], options: Mapping[str, Any]) -> None:
    if others:
        raise UsageError(f"--{name} cannot be combined with {others[0]}")
    if options["script"]:
        raise UsageError(f"--{name}: {options['script']}: no script is run")
    if given := next((option for option in HOST_OPTIONS if options[option] is not None), ""):
        raise UsageError(
            f"--{name} reads files of this machine, and --{given} names others",
            f"On the machine of the launcher: ddplaunch --{name} RUN_ID.",
        )
