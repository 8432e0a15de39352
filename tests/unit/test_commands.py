"""The table of commands: what it names exists, and what a command takes."""

from __future__ import annotations

import inspect

import pytest

from ddplaunch.cli import commands, main
from ddplaunch.cli.commands import COMMANDS, OF_COMMANDS
from ddplaunch.errors import UsageError
from ddplaunch.rows import Command, load

BY_NAME = {option.long_name: option.row for options in main.command.groups.values() for option in options}


@pytest.mark.features
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.run)
def test_a_row_names_an_option_and_a_function_of_a_request(command: Command) -> None:
    assert command.option in BY_NAME
    parameters = [*inspect.signature(load(command.run)).parameters.values()]
    assert [each.annotation for each in parameters][:1] == ["LaunchConfig" if command.starts_run else "Request"]
    assert len(parameters) == (3 if command.starts_run else 1)


@pytest.mark.features
def test_options_of_a_command_name_it() -> None:
    named = {row.of for row in BY_NAME.values() if row.of}
    assert named <= {command.option for command in COMMANDS}
    assert {"ps", "all", "json", "detach"} <= OF_COMMANDS
    assert not OF_COMMANDS & {"hosts", "log_dir", "quiet"}


def options(**given: object) -> dict[str, object]:
    absent = {row.name: False if row.metavar is None else None for row in BY_NAME.values()}
    return {**absent, "script": "", "connect_timeout": "15", **given}


@pytest.mark.features
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.run)
def test_a_command_about_files_takes_no_hosts(command: Command) -> None:
    reads_files = not (command.takes_script or command.takes_hosts)
    if reads_files:
        with pytest.raises(UsageError, match="reads files of this machine, and --avoid names others"):
            commands.run(command, options(avoid="gpu1"), print, print, dict, ())
