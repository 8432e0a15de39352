"""Dispatches the commands that come back to a run: ``--leave``, ``--attach``, ``--logs``, ``--wait``, ``--ps RUN_ID``.

Runs in the process that the user started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.cli import values
from ddplaunch.cli.host_options import HOST_OPTIONS
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_COMMANDS = ("leave", "attach", "logs", "wait", "ps")
_OF_LOGS = ("ranks", "attempt", "follow")


def popped(options: dict[str, Any]) -> dict[str, str]:
    """Take these commands out of ``options``; returns those that are given, with their run ids.

    Raises:
        UsageError: an option of --logs without it.
    """
    run_ids = {name: options.pop(name) for name in _COMMANDS}
    run_ids["ps"] = run_ids["ps"] or None  # Without a run id it is another command.
    given = next((name for name in _OF_LOGS if options[name] not in (None, False)), "")
    if given and run_ids["logs"] is None:
        raise UsageError(f"--{given}: needs --logs", _HINTS.get(given, ""))
    if run_ids["logs"] is None:
        for name in _OF_LOGS:
            del options[name]
    return {name: value for name, value in run_ids.items() if value is not None}


_HINTS = {"ranks": "--ranks-filter chooses the ranks whose lines the console shows."}


def run(
    commands: Mapping[str, str],
    others: Sequence[str],
    options: Mapping[str, Any],
    show: Callable[[str], None],
    report: Callable[[str], None],
) -> int:
    """Run the only one of ``commands`` and return its exit code; ``show`` prints a result, ``report`` a message.

    Raises:
        UsageError: it cannot be combined with ``others`` or with one of ``options``; or as the command.
        LaunchError: as the command.
    """
    name, *more = commands
    _check(name, [*(f"--{each}" for each in more), *others], options)
    text, log_dir = commands[name], options["log_dir"]
    if name == "logs":
        return _logs(text, options, report)
    if name == "leave":
        from ddplaunch.features.come_back import launcher_request

        return launcher_request.leave(text, log_dir, report)
    if name == "ps":
        from ddplaunch.features.usage import live

        return live.live(text, log_dir, show)
    from ddplaunch.features.come_back import attach

    return attach.wait(text, log_dir) if name == "wait" else attach.attach(text, log_dir, report)


def _logs(run_id: str, options: Mapping[str, Any], report: Callable[[str], None]) -> int:
    from ddplaunch.features.come_back import logs

    attempt = options["attempt"]
    request = logs.LogsRequest(
        run_id,
        None if options["ranks"] is None else values.parse_ranks(options["ranks"], "--ranks"),
        None if attempt is None else values.parse_whole(attempt, "--attempt"),
        options["follow"],
    )
    return logs.logs(request, options["log_dir"], report)


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
