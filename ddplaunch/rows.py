"""Rows of the tables of options and commands: plain data, so that whoever has an option can bring its row.

The command line makes its parser and its help page of them. What a row names as ``module:name`` is imported on use.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        names: all of its names, the long one last: "-r --redirects".
        metavar: name of the value on the help page; None: a flag.
        text: description on the help page.
        default: value if neither the command line nor the environment gives one.
        pet: the variable ``PET_<NAME>`` sets it, too, as with torchrun.
        can_be_bare: it may stand without its value, which is empty then.
        multiple: it may be given several times.
        hidden: it is not on the help page.
        short: description on the short help page, of ``-h``; empty: it is not on that page.
        choices: all possible values; empty: not limited.
        path: the value is the path of a file or of a folder.
        prints: returns what it prints, of the parser's context; it then ends the command.
        of: the command without which it has no meaning: "--logs".
        parse: returns its value, of its text and its name; None: the text is its value.
    """

    names: str
    metavar: str | None
    text: str
    default: str | None = None
    pet: bool = True
    can_be_bare: bool = False
    multiple: bool = False
    hidden: bool = False
    short: str = ""
    choices: tuple[str, ...] = ()
    path: Literal["", "file", "folder"] = ""
    prints: Callable[[Any], object] | None = None
    of: str = ""
    parse: Callable[[str, str], object] | None = None

    @property
    def long_name(self) -> str:
        """Its name in messages, with dashes."""
        return self.names.split()[-1]

    @property
    def name(self) -> str:
        """Its key in the options that were parsed."""
        return self.long_name.removeprefix("--").replace("-", "_")

    def value(self, text: Any) -> Any:
        """Its value, of what was given; None and a flag stay as they are.

        Raises:
            OptionError: the text is not valid.
        """
        return self.parse(text, self.long_name) if self.parse and isinstance(text, str) else text


def flag(names: str, text: str, **attributes: Any) -> Option:
    """An option without a value."""
    return Option(names, None, text, **attributes)


@dataclass(frozen=True)
class Command:
    """A command that is not a run.

    Attributes:
        option: its option. That may need another one itself, as --all needs --ps.
        run: its function, ``module:name``: takes a ``Request`` and returns the exit code, or None for 0. Empty: it is a
            run, which is only started in another way.
        needs_value: it is this command only if the option has a value.
        takes_script: it takes a script and all options of a run.
        takes_hosts: it asks other machines, too. Without both it reads files of this machine.
    """

    option: str
    run: str
    needs_value: bool = False
    takes_script: bool = False
    takes_hosts: bool = False


def load(path: str) -> Any:
    """What ``module:name`` of a row names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
