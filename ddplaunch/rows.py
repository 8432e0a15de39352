"""Rows of the tables of options, commands and transports, and parsers that several rows use.

The command line makes its parser and its help page of the rows: its own, and those that the features bring. What a row
names as ``module:name`` is imported on use. Options and commands are no dataclasses, whose methods would take 2 ms of
each start to make.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ddplaunch.errors import OptionError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import seconds

COMING_BACK = "Leaving a run and coming back"
EXISTING_RUNS = "Existing runs (yours, here and on --hosts)"
"""Headings of the help page."""

GROUPS = ("", "workers", "output", "timeouts", "remote")
"""The groups of LaunchConfig whose fields options set; "" are its own fields."""


class Condition:
    """What a run must be like, so that an option has an effect.

    Attributes:
        text: as in "has an effect only with --dry-run".
        holds: whether a LaunchConfig is like that.
        is_error: whether the option is an error if it is not; otherwise --plan says that it has no effect.
    """

    def __init__(
        self,
        text: str,
        holds: Callable[[Any], bool],
        *,
        is_error: bool = True,
    ) -> None:
        self.text = text
        self.holds = holds
        self.is_error = is_error


DRY_RUN = Condition("with --dry-run", lambda config: config.dry_run)
REAL_RUN = Condition("without --dry-run", lambda config: not config.dry_run, is_error=False)
LOGS = Condition("with log files, and --log-dir /dev/null keeps none", lambda config: config.output.keeps_files)
PYTHON = Condition("without --no-python", lambda config: config.entry != "program")
HOSTS = Condition("with --hosts or --hostfile", lambda config: config.dry_run or bool(config.hosts))
SSH = Condition("over SSH, with --hosts or --hostfile", lambda config: config.dry_run or config.transport == "ssh")


def _check_sets(names: str, sets: str, only: tuple[Condition, ...]) -> None:
    """Raise ValueError as ``Option`` does."""
    if only and not sets:
        raise ValueError(f"{names}: an option with `only` needs `sets`, the field by which it is seen to be given")
    if sets.rpartition(".")[0] not in GROUPS:
        raise ValueError(f"{names}: no option sets {sets}, only fields of {', '.join(GROUPS[1:])} or of none of these")


class Option:
    """An option of the command line.

    Attributes:
        names: all of its names, the long one last: "-r --redirects".
        long_name: its name in messages: "--max-restarts".
        name: its key in the options that were parsed: "max_restarts".
        metavar: name of the value on the help page; None: a flag.
        text: description on the help page.
        default: value if neither the command line nor the environment gives one.
        pet: it is an option of torchrun; the variable ``PET_<NAME>`` sets it, too.
        can_be_bare: it may stand without its value, which is empty then.
        multiple: it may be given several times.
        hidden: it is not on the help page.
        short: description on the short help page, of ``-h``; empty: it is not on that page.
        choices: all possible values; empty: not limited.
        completes: what a shell offers for its value: words, ``file``, ``folder`` or ``module:function``; empty:
            ``choices``.
        prints: returns what it prints, of the parser's context; it then ends the command. An option with a value does
            that if the value is ``help``.
        of: the command without which it has no meaning: "--logs".
        parse: returns its value, of its text and its name; None: the text is its value, and an empty one is none.
        sets: the field of LaunchConfig that its value is for: "output.log_dir". If it is not given, the field keeps its
            default. Empty: several options together decide, in ``cli.build_config``.
        gives: value of a flag.
        variable: name of a variable of the environment that has its text if it is not given.
        only: conditions of an option with ``sets``; if one does not hold, it has no effect.
        names_hosts: its value is hosts of the run, all or some; in such a run one launcher leads all nodes.
        heading: an option of a feature stands at the end of this section of the help page; or see ``after``.
        after: an option of a feature without ``heading`` stands below this option of the core on the help page, and
            one with ``of`` below that command's.

    Raises:
        ValueError: it has ``only`` without ``sets``: whether such an option is given, nobody could tell. Or the field
            that it ``sets`` is in none of ``GROUPS``: it would never be set.
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
        completes: tuple[str, ...] | str = (),
        prints: Callable[[Any], object] | None = None,
        of: str = "",
        parse: Callable[[str, str], object] | None = None,
        sets: str = "",
        gives: object = True,
        variable: str = "",
        only: tuple[Condition, ...] = (),
        names_hosts: bool = False,
        heading: str = "",
        after: str = "",
    ) -> None:
        _check_sets(names, sets, only)
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
        self.completes = completes
        self.prints = prints
        self.of = of
        self.parse = parse
        self.sets = sets
        self.gives = gives
        self.variable = variable
        self.only = only
        self.names_hosts = names_hosts
        self.heading = heading
        self.after = after

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
        if self.choices and given not in self.choices:
            raise OptionError(origin, given, f"must be {', '.join(self.choices[:-1])} or {self.choices[-1]}")
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
        takes: names of options of a run that mean something else with it.
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
        takes: tuple[str, ...] = (),
    ) -> None:
        self.option = option
        self.run = run
        self.needs_value = needs_value
        self.takes_script = takes_script
        self.starts_run = starts_run
        self.takes_hosts = takes_hosts
        self.takes = takes


@dataclass(frozen=True, kw_only=True)
class TransportRow:
    """One way in which the agents of a run are started and reached.

    Attributes:
        name: its word for ``--transport``, and in ``RemoteConfig.transport``.
        class_path: its subclass of ``Transport``, ``module:name``.
        way: how it starts the agents, as ``--plan`` prints it: "through srun".
        keeps_warm: a process that an agent leaves on the host, as the keeper of ``--keep-warm``, lives on when the
            command that started the agent has ended. False for srun: SLURM ends all processes of a step with it.
        where: where it can be used, as the help of ``--transport`` prints it: "in a SLURM job"; empty: everywhere.
        login_command: command that opens a shell on the host HOST, for hints; empty: hints name no command.
        takes_logins: it uses the user and the port that a host of ``--hosts`` has; others refuse them.
    """

    name: str
    class_path: str
    way: str
    keeps_warm: bool
    where: str = ""
    login_command: str = ""
    takes_logins: bool = False


def load(path: str) -> Any:
    """What ``module:name`` of a row names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


MAX_RANK = 1_000_000


def parse_whole(text: str, option: str) -> int:
    """A whole number.

    Raises:
        OptionError: anything else.
    """
    try:
        return int(text)
    except ValueError:
        raise OptionError(option, text, "must be a whole number") from None


def parse_count(text: str, option: str) -> int:
    """A whole number that is not negative.

    Raises:
        OptionError: anything else.
    """
    number = parse_whole(text, option)
    if number < 0:
        raise OptionError(option, text, "must not be negative")
    return number


def parse_seconds(text: str, option: str) -> float:
    """A time: a number of seconds, of either sign, or with units: ``90s``, ``5m``, ``1h30m``.

    Raises:
        OptionError: neither, or not finite.
    """
    found_s = seconds(text)
    if found_s is None:
        try:
            found_s = float(text)
        except ValueError:
            found_s = math.nan
    if not math.isfinite(found_s):
        raise OptionError(option, text, "must be a number of seconds, or a time like 90s, 5m or 1h30m")
    return found_s


def parse_positive_seconds(text: str, option: str) -> float:
    """A time as of ``parse_seconds``, above 0.

    Raises:
        OptionError: anything else.
    """
    found_s = parse_seconds(text, option)
    if found_s <= 0:
        raise OptionError(option, text, "must be above 0")
    return found_s


def parse_ranks(text: str, option: str) -> frozenset[int] | None:
    """``0,4-7`` as a set of ranks; an empty text means no filter.

    Raises:
        OptionError: anything else.
    """
    if not text.strip():
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= MAX_RANK:
            raise OptionError(option, text, "must be ranks like 0,4-7")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
