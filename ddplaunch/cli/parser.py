"""The option parser: reads options as torchrun's argparse does, and shows a help page in groups.

Runs in the launcher. Contains no particular option. click is imported only here and in the other ``cli`` modules.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ddplaunch.errors import UsageError
from ddplaunch.rows import Option, load

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


HELP_COLUMN = 27
"""Width of the first column of the help page; a longer name gets a separate line."""


INHERITED = "ddplaunch.inherited"
"""Key of ``Context.meta``: names of the options that were set by the environment."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class ParsedOption(click.Option):
    """click's form of a row.

    The parser itself reads ``pet_variable``, in place of click's ``envvar``: click 8.2 reads PET_MODULE=0 as true.
    """

    def __init__(self, row: Option) -> None:
        attributes: dict[str, Any] = {"multiple": row.multiple, "hidden": row.hidden}
        if row.metavar is not None and not row.multiple:  # click 8.3 takes a flag's default of None for a third state
            attributes["default"] = row.default
        if row.prints:
            attributes |= {"is_eager": row.metavar is None, "expose_value": row.metavar is not None}
            attributes["callback"] = self._print
        self.row, self.long_name = row, row.long_name
        self.pet_variable = "PET_" + self.long_name.removeprefix("--").replace("-", "_").upper() if row.pet else ""
        super().__init__(
            row.names.split(), metavar=row.metavar, help=row.text, is_flag=row.metavar is None, **attributes
        )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """What a shell offers for the value (overrides click)."""
        from click.shell_completion import CompletionItem

        found = self.row.completes or self.row.choices
        if found in ("file", "folder"):
            return complete_path(ctx, self, incomplete, "file" if found == "file" else "dir")
        words = load(found)() if isinstance(found, str) else found
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]

    def _print(self, ctx: click.Context, _param: click.Parameter, given: Any) -> Any:
        is_asked = given if self.row.metavar is None else "help" in (given if self.row.multiple else (given,))
        if is_asked and self.row.prints and not ctx.resilient_parsing:
            click.echo(self.row.prints(ctx))
            ctx.exit()
        return given


def complete_path(_ctx: click.Context, _param: click.Parameter, incomplete: str, kind: str = "file") -> list[Any]:
    """Let the shell complete ``incomplete`` as a path; ``dir``: of a folder."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type=kind)]


class GroupedCommand(click.Command):
    """A command that reads options as argparse does, and shows them under headings.

    Args:
        callback: called with the options' values; ``main(standalone_mode=False)`` returns its result.
        groups: heading -> options, in the help page's order.
        arguments: the script and its arguments; nothing after the first one is interpreted.
        before: the help page's text above the options.
        after: heading -> rows of the sections below them.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[..., Any],
        groups: Mapping[str, Sequence[Option]],
        arguments: Sequence[click.Argument],
        before: str,
        after: Mapping[str, Sequence[tuple[str, str]]],
    ) -> None:
        self.groups = {heading: [ParsedOption(row) for row in rows] for heading, rows in groups.items()}
        params = [*(option for options in self.groups.values() for option in options), *arguments]
        settings = {"help_option_names": ["--help"], "max_content_width": 80}
        super().__init__(name, context_settings=settings, callback=callback, params=params, help=before)
        self.after = after

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Resolve aliases and abbreviations, then add options from the environment, then parse."""
        try:
            spelled, rest = normalize(self.get_params(ctx), args)
        except UsageError:
            if not ctx.resilient_parsing:
                raise
            return super().parse_args(ctx, args)
        # Shell completion (resilient): options set by the environment must still be offered.
        inherited = {} if ctx.resilient_parsing else from_environ(self.groups, spelled, os.environ)
        ctx.meta[INHERITED] = frozenset(inherited)
        return super().parse_args(ctx, [*inherited.values(), *spelled, "--", *rest])

    def short_help_page(self, ctx: click.Context, last_line: str) -> str:
        """The help page with the most used options only, and ``last_line``."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        options = [option for group in self.groups.values() for option in group if option.row.short]
        rows = [(f"{option.opts[0]} {option.metavar or ''}", option.row.short) for option in options]
        _write_rows(formatter, "Most used options", rows)
        return f"{formatter.getvalue()}\n{last_line}"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings (overrides click)."""
        records = {heading: [o.get_help_record(ctx) for o in options] for heading, options in self.groups.items()}
        help_option = self.get_help_option(ctx)
        if help_option:
            records[list(records)[-1]].append(help_option.get_help_record(ctx))
        for heading, rows in records.items():
            _write_rows(formatter, heading, [row for row in rows if row])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections after the options."""
        for heading, rows in self.after.items():
            _write_rows(formatter, heading, rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options before the script, and only files after it."""
        if ctx.params.get("script"):
            return complete_path(ctx, self.params[-1], incomplete)
        return super().shell_complete(ctx, incomplete)


def _write_rows(formatter: click.HelpFormatter, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    with formatter.section(heading):
        formatter.write_dl([(term.ljust(HELP_COLUMN), text) for term, text in rows], col_max=HELP_COLUMN)


def from_environ(
    groups: Mapping[str, Sequence[ParsedOption]], spelled: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Options set by a PET variable and not on the command line: name -> option as it would be typed.

    Raises:
        UsageError: the variable of a flag is neither true nor false.
    """
    typed = {token.partition("=")[0] for token in spelled}
    options = (option for options in groups.values() for option in options)
    inherited = [option for option in options if environ.get(option.pet_variable) and option.long_name not in typed]
    found = {}
    for option in inherited:
        if not option.is_flag:
            found[option.long_name] = f"{option.long_name}={environ[option.pet_variable]}"
        elif _is_true(option.pet_variable, environ[option.pet_variable]):
            found[option.long_name] = option.long_name
    return found


def _is_true(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise UsageError(f"{name}={text}: must be 0 or 1, true or false, yes or no")
    return word in _TRUE


def normalize(params: Iterable[click.Parameter], args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options, each as ``--full-name`` or ``--full-name=value``, and the remaining arguments from the script on.

    Rules of argparse: an option may be abbreviated; ``-r3``, ``-r 3`` and ``-r=3`` are equivalent; a value that
    resembles an option must be attached with ``=``; one ``--`` next to the script, before or after it, is dropped. In
    addition, ``_`` and ``-`` are equivalent in names.

    Raises:
        UsageError: an unknown or ambiguous option, a missing value, or a value for a flag.
    """
    options = [param for param in params if isinstance(param, click.Option)]
    names = {name: option for option in options for name in option.opts}
    rest = deque(args)
    spelled: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        token = rest.popleft()
        if token == "--":
            return spelled, list(rest)
        spelled += [_long(token, rest, names)] if token.startswith("--") else _short(token, rest, names)
    return spelled, _without_separator(list(rest))


def _without_separator(rest: list[str]) -> list[str]:
    """``rest`` without a ``--`` directly after the script, as argparse reads ``torchrun x.py -- --epochs 3``."""
    return [*rest[:1], *rest[2:]] if rest[1:2] == ["--"] else rest


def _long(token: str, rest: deque[str], names: Mapping[str, click.Option]) -> str:
    typed, attached, value = token.partition("=")
    name = _full_name(typed, names)
    if names[name].is_flag:
        if attached:
            raise UsageError(f"{name} takes no value")
        return name
    return f"{name}={value if attached else _next_value(name, names, rest)}"


def _short(token: str, rest: deque[str], names: Mapping[str, click.Option]) -> list[str]:
    """Combined flags, the last of which may be an option with a value: ``-m``, ``-mr3``, ``-mr 3``."""
    spelled: list[str] = []
    for end, letter in enumerate(token[1:], start=2):
        name = f"-{letter}"
        if name not in names:
            raise _unknown(name, names)
        spelled.append(max(names[name].opts, key=len))
        if not names[name].is_flag:
            attached = token[end:]
            spelled[-1] += f"={attached.removeprefix('=') if attached else _next_value(name, names, rest)}"
            break
    return spelled


def _next_value(name: str, names: Mapping[str, click.Option], rest: deque[str]) -> str:
    option = names[name]
    resembles_option = rest and re.match(r"-(?!\d+$|\d*\.\d+$)\S+$", rest[0])
    if not rest or resembles_option:
        if isinstance(option, ParsedOption) and option.row.can_be_bare:
            return ""
        hint = f"A value that starts with a dash is written {name}={rest[0]}" if rest else ""
        raise UsageError(f"{name} needs a value", hint)
    return rest.popleft()


def _full_name(typed: str, names: Mapping[str, click.Option]) -> str:
    name = typed.replace("_", "-")
    if name in names:
        return name
    candidates = [full for full, option in names.items() if full.startswith(name) and not option.hidden]
    of_torchrun = [full for full in candidates if full == "--help" or _is_torchruns(names[full])]
    if len(of_torchrun) == 1:  # An abbreviation that is unique in torchrun keeps its meaning.
        return of_torchrun[0]
    if len(candidates) > 1:
        raise UsageError(f"{typed} is ambiguous: {', '.join(sorted(candidates))}", "Type more of its letters.")
    if not candidates:
        raise _unknown(typed, names)
    return candidates[0]


def _is_torchruns(option: click.Option) -> bool:
    return isinstance(option, ParsedOption) and bool(option.pet_variable)


_OF_OTHER_LAUNCHERS = {
    **dict.fromkeys(("-n", "--np", "--num-gpus", "--num-processes", "--num-procs", "--ngpus"), "--nproc-per-node"),
    **dict.fromkeys(("-N", "--num-nodes", "--num-machines"), "--nnodes"),
    **dict.fromkeys(("-H", "-w", "--nodelist"), "--hosts"),
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
}
"""Options of mpirun, srun, accelerate and deepspeed, and what they are here."""


def _unknown(typed: str, names: Mapping[str, click.Option]) -> UsageError:
    meant = _OF_OTHER_LAUNCHERS.get(typed.replace("_", "-"))
    if meant in names:
        return UsageError(f"no such option: {typed}", f"Did you mean {meant}?")
    shown = [name for name, option in names.items() if name.startswith("--") and not option.hidden]
    near = similar(typed.replace("_", "-"), shown)
    hint = f"Did you mean {' or '.join(near)}?" if near else "Options of the script go after the script."
    return UsageError(f"no such option: {typed}", hint)


def similar(typed: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that resemble ``typed``, or begin like it: --nprocs resembles --nproc-per-node. Best first."""
    from difflib import get_close_matches

    starts = {start: name for name in names for start in (name[: len(typed)], name)}
    return [*dict.fromkeys(starts[start] for start in get_close_matches(typed, starts, cutoff=0.8))]
