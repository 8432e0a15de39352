"""The commands that are not a run: one table, what they get and have in common, and what they cannot be combined with.

Runs in the process that the user started, and imports a command when it is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

from ddplaunch import features
from ddplaunch.cli.host_options import HOST_OPTIONS
from ddplaunch.cli.options import ROWS
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.rows import Command, Option, load
from ddplaunch.timeouts import TimeoutConfig

_ROWS = {row.long_name: row for row in ROWS}

COMMANDS = [row for row in features.rows() if isinstance(row, Command) and row.option in _ROWS]
"""All of them are of features."""

WORDS = {row.option.removeprefix("--") for row in COMMANDS}
"""What might be typed without dashes."""

_OF_ALL = ("log_dir", "verbose", "quiet")
_OF_HOSTS = (*HOST_OPTIONS, "export", "env_file", "cluster", "shutdown_timeout")
"""Names of the options of a run that commands without a script take: all of them, and those that ask other machines."""

OF_COMMANDS = {row.name for row in ROWS if row.of} | {_ROWS[row.option].name for row in COMMANDS}
"""Names of the options that are not of a run."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks a command for.

    Attributes:
        value: the value of the command's option; empty for a flag.
        options: the values of all options by name. Those of the command itself are parsed, as its row says.
        show: prints a result on stdout.
        report: prints a message on stderr, unless --quiet is given.
        hosts: the other machines, of a command that takes hosts.
        remote: how to connect to them.
        grace_s: --shutdown-timeout, of a command that takes hosts.
        configure: returns the configuration of a run with the user's options, and those that are given in their place.
    """

    value: Any
    options: Mapping[str, Any]
    show: Callable[[str], None]
    report: Callable[[str], None]
    configure: Callable[..., LaunchConfig]
    hosts: tuple[Host, ...] = ()
    remote: RemoteConfig = RemoteConfig()
    grace_s: float = TimeoutConfig.shutdown_timeout_s

    @property
    def log_dir(self) -> str | None:
        """--log-dir."""
        log_dir: str | None = self.options["log_dir"]
        return log_dir

    @property
    def is_verbose(self) -> bool:
        """--verbose."""
        return bool(self.options["verbose"])


def chosen(options: Mapping[str, Any]) -> Command | None:
    """The command that ``options`` give; None: they are those of a run.

    Raises:
        UsageError: two commands are given, or an option of another one.
    """
    for row in ROWS:
        if row.of and _is_given(options[row.name]) and not _is_given(options[_ROWS[row.of].name]):
            raise UsageError(f"{row.long_name}: needs {row.of}", row.text)
    given = [row for row in COMMANDS if _is_given(value := options[_ROWS[row.option].name]) and _fits(row, value)]
    if not given:
        return None
    # Of --ps, --ps RUN_ID and --ps --all, the last two say more.
    command = min(given, key=lambda row: not (row.needs_value or _ROWS[row.option].of))
    for other in given:
        if other.option not in (command.option, _ROWS[command.option].of):
            raise UsageError(f"{_words(command)} cannot be combined with {other.option}")
    return command


def run(
    command: Command,
    options: Mapping[str, Any],
    show: Callable[[str], None],
    report: Callable[[str], None],
    configure: Callable[..., LaunchConfig],
    inherited: Container[str],
) -> int:
    """Run a command and return its exit code; the arguments are those of the ``Request``.

    ``inherited``: long names of the options that the environment has set; they are meant for runs.

    Raises:
        UsageError, LaunchError: as the command; or it cannot be combined with an option.
    """
    from ddplaunch.cli.build_config import connection_options

    _check(command, options, inherited)
    own = {row.name: _value(row, options) for row in ROWS if command.option in (row.of, row.long_name)}
    request = Request(
        value=own[_ROWS[command.option].name],
        options={**options, **own},
        show=show,
        report=(lambda _: None) if options["quiet"] else report,
        configure=configure,
    )
    if not command.takes_script:
        # Hosts in the environment are meant for runs.
        hosts, remote, grace_s = connection_options(options, os.environ if command.takes_hosts else {})
        request = replace(request, hosts=hosts, remote=remote, grace_s=grace_s)
    return load(command.run)(request) or 0


def _value(row: Option, options: Mapping[str, Any]) -> Any:
    given = options[row.name]
    return row.value(given, row.long_name) if row.is_given(given) else given


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _fits(command: Command, value: object) -> bool:
    return bool(value) or not command.needs_value


def _words(command: Command) -> str:
    """The options that give the command."""
    return f"{_ROWS[command.option].of} {command.option}".lstrip()


def _check(command: Command, options: Mapping[str, Any], inherited: Container[str]) -> None:
    if command.takes_script:
        return
    words, metavar = _words(command), _ROWS[command.option].metavar or ""
    if options["script"]:
        hint = "--hosts and --hostfile name other machines." if command.takes_hosts else ""
        raise UsageError(f"{words}: {options['script']}: no script is run", hint)
    _check_options(command, options, inherited)
    if command.takes_hosts:
        return
    if given := next((option for option in HOST_OPTIONS if options[option] is not None), ""):
        message = f"{words} reads files of this machine, and --{given} names others"
        raise UsageError(message, f"On that machine: ddplaunch {words} {metavar}".rstrip() + ".")


def _check_options(command: Command, options: Mapping[str, Any], inherited: Container[str]) -> None:
    """Refuse an option of a run: a user who gives one means something else by it, as by ``--logs job7 -r 1``."""
    taken = (*_OF_ALL, *_OF_HOSTS, *command.takes)
    own = {command.option, _ROWS[command.option].of} - {""}
    for row in ROWS:
        is_given = options[row.name] not in (None, False, (), row.default) and row.long_name not in inherited
        is_taken = row.name in taken or row.sets.startswith("remote.") or row.long_name in own or row.of in own
        if is_given and not is_taken:
            more = ", ".join(other.long_name for other in ROWS if other.of and other.of == command.option)
            hint = f"Options of {command.option}: {more}." if more else ""
            raise UsageError(f"{_words(command)}: {row.long_name} is an option of a run, and has no effect", hint)
