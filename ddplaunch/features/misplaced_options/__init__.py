"""Options of ddplaunch that stand after the script, which gets them as its arguments: the user is told.

Not if the text of the script names them: it has such options of its own. Runs in the launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import StartNotice

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

_MIN_LETTERS = 6
"""Of an abbreviated option, with its dashes."""


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """``config``, with a warning if the script gets options of ddplaunch, and is seen to read no arguments."""
    names = misplaced(config.script_args)
    if not names:
        return config
    from ddplaunch.features.misplaced_options.script_text import reads_arguments, text_of

    if reads_arguments(text_of(config)):
        return config
    notice = StartNotice("warning", f"{config.script} reads no arguments; {sentence(names)}")
    return replace(config, notices=(*config.notices, notice))


def misplaced(arguments: Sequence[str], *, abbreviated: bool = False) -> list[str]:
    """The options of ddplaunch among ``arguments``, as they are typed; with ``abbreviated`` also beginnings of them."""
    typed = dict.fromkeys(argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    if not typed:
        return []
    from ddplaunch.cli.options import ROWS

    known = {name for row in ROWS for name in row.names.split()}

    def is_ours(name: str) -> bool:
        return name in known or (
            abbreviated and len(name) >= _MIN_LETTERS and any(full.startswith(name) for full in known)
        )

    return [name for name in typed if is_ours(name.replace("_", "-"))]


def sentence(names: Sequence[str]) -> str:
    """What is wrong with these options, and what to do."""
    verb, them = ("stand", "them") if names[1:] else ("stands", "it")
    return (
        f"{', '.join(names)} {verb} after the script, which gets {them}: options of ddplaunch stand before the script"
    )
