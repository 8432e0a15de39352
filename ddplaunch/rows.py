"""Rows of the tables of options and commands: plain data, so that whoever has an option can bring its row.

The command line makes its parser and its help page of them. What a row names as ``module:name`` is imported on use.
The rows are no dataclasses, whose methods would take 2 ms of each start to make.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable


class Condition:
    """What a run must be like, so that an option has an effect.

    Attributes:
        text: as in "has an effect only with --dry-run".
        holds: whether a LaunchConfig is like that.
        is_needed: the option is an error if it is not; otherwise --plan says that it has no effect.
    """

    def __init__(
        self,
        text: str,
        holds: Callable[[Any], bool],
        *,
        is_needed: bool = True,
    ) -> None:
        self.text = text
        self.holds = holds
        self.is_needed = is_needed


DRY_RUN = Condition("with --dry-run", lambda config: config.dry_run)
REAL_RUN = Condition("without --dry-run", lambda config: not config.dry_run, is_needed=False)
LOGS = Condition("with log files, and --log-dir /dev/null keeps none", lambda config: config.output.keeps_files)
PYTHON = Condition("without --no-python", lambda config: config.entry != "program")
HOSTS = Condition("with --hosts or --hostfile", lambda config: config.dry_run or bool(config.hosts))
SSH = Condition("over SSH, with --hosts or --hostfile", lambda config: config.dry_run or config.transport == "ssh")


class Option:
    """An option of the command line.

    Attributes:
        names: all of its names, the long one last: "-r --redirects".
        long_name: its name in messages: "--max-restarts".
        name: its key in the options that were parsed: "max_restarts".
        metavar: name of the value on the help page; None: a flag.
        text: description on the help page.
        default: value if neither the command line nor the environment gives one.
        pet: it is one of torchrun's, which the variable ``PET_<NAME>`` sets, too.
        can_be_bare: it may stand without its value, which is empty then.
        multiple: it may be given several times.
        hidden: it is not on the help page.
        short: description on the short help page, of ``-h``; empty: it is not on that page.
        choices: all possible values; empty: not limited.
        path: the value is the path of a file or of a folder.
        completes: what a shell offers for its value: words, or ``module:function``; empty: as its type says.
        prints: returns what it prints, of the parser's context; it then ends the command.
        of: the command without which it has no meaning: "--logs".
        parse: returns its value, of its text and its name; None: the text is its value, and an empty one is none.
        sets: the field of LaunchConfig that its value is for: "output.log_dir". If it is not given, the field keeps its
            default. Empty: several options together decide, in ``cli.build_config``.
        gives: value of a flag.
        variable: name of a variable of the environment that has its text if it is not given.
        only: without these it has no effect.
        feature: it is of this feature, and there is none without that. Empty: it is of the core.
    """

    def __init__(
        self,
        names: str,
        metavar: str | None,
        text: str,
        default: str | None = None,
        *,
        pet: bool = False,
        can_be_bare: bool = False,
        multiple: bool = False,
        hidden: bool = False,
        short: str = "",
        choices: tuple[str, ...] = (),
        path: Literal["", "file", "folder"] = "",
        completes: tuple[str, ...] | str = (),
        prints: Callable[[Any], object] | None = None,
        of: str = "",
        parse: Callable[[str, str], object] | None = None,
        sets: str = "",
        gives: object = True,
        variable: str = "",
        only: tuple[Condition, ...] = (),
        feature: str = "",
    ) -> None:
        self.names = names
        self.long_name = names.split()[-1]
        self.name = self.long_name.removeprefix("--").replace("-", "_")
        self.metavar = metavar
        self.text = text
        self.default = default
        self.pet = pet
        self.can_be_bare = can_be_bare
        self.multiple = multiple
        self.hidden = hidden
        self.short = short
        self.choices = choices
        self.path = path
        self.completes = completes
        self.prints = prints
        self.of = of
        self.parse = parse
        self.sets = sets
        self.gives = gives
        self.variable = variable
        self.only = only
        self.feature = feature

    def is_given(self, given: object) -> bool:
        """Whether it has a value, by what the parser has returned for it."""
        return given not in (None, False, ()) and bool(given or self.parse)

    def value(self, given: Any, origin: str) -> Any:
        """Its value, of what was given; ``origin`` is the name of the option or of its variable.

        Raises:
            OptionError: the text is not valid.
        """
        if self.metavar is None:
            return self.gives
        if self.multiple:
            return tuple(self.parse(each, origin) if self.parse else each for each in given)
        return self.parse(given, origin) if self.parse else given


def flag(names: str, text: str, **attributes: Any) -> Option:
    """An option without a value."""
    return Option(names, None, text, **attributes)


class Command:
    """A command that is not a run.

    Attributes:
        option: its option. That may need another one itself, as --all needs --ps.
        run: its function, ``module:name``: takes a ``Request`` and returns the exit code, or None for 0.
        starts_run: it is a run that is started in another way: ``run`` takes its LaunchConfig, and what ``show`` and
            ``report`` are in a ``Request``.
        needs_value: it is this command only if the option has a value.
        takes_script: it takes a script and all options of a run.
        takes_hosts: it asks other machines, too. Without both it reads files of this machine.
    """

    def __init__(
        self,
        option: str,
        *,
        run: str,
        needs_value: bool = False,
        takes_script: bool = False,
        starts_run: bool = False,
        takes_hosts: bool = False,
    ) -> None:
        self.option = option
        self.run = run
        self.needs_value = needs_value
        self.takes_script = takes_script
        self.starts_run = starts_run
        self.takes_hosts = takes_hosts


def load(path: str) -> Any:
    """What ``module:name`` of a row names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
