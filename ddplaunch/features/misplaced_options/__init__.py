"""Options of ddplaunch that stand after the script, which gets them as its arguments: the user is told.

Not if the text of the script names them: it has such options of its own. Runs in the launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import StartNotice
from ddplaunch.system.files import kept_files

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

_MIN_LETTERS = 6
"""Of an abbreviated option, with its dashes."""

_MAX_BYTES = 1 << 20

_READ_NO_ARGUMENTS = sys.stdlib_module_names | {
    *("numpy", "scipy", "pandas", "sklearn", "torch", "torchvision", "torchaudio"),
    *("matplotlib", "PIL", "tqdm", "yaml", "psutil", "requests"),
}
_READ_ARGUMENTS = {"argparse", "optparse", "getopt", "fileinput", "unittest", "importlib", "runpy", "torch.testing"}
_WORDS = {"argv", "orig_argv", "exec", "eval", "__import__"}


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """``config``, with a warning if the script gets options of ddplaunch, and is seen to read no arguments."""
    names = misplaced(config.script_args)
    if not names or reads_arguments(text_of(config)):
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


# The text of the script.


def text_of(config: LaunchConfig) -> str:
    """The text of the script; empty if it is none in Python, is very long, or cannot be read on this machine."""
    if config.text or config.entry != "script":
        return config.text if config.entry == "script" else ""
    try:
        with kept_files.open_regular(config.script) as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError):
        return ""
    return data.decode("utf-8", "replace") if len(data) <= _MAX_BYTES else ""


def reads_arguments(text: str) -> bool:
    """Whether a script may read its arguments: False only if its text and all modules that it imports show it."""
    import ast  # Most runs do without.

    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    words = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in nodes}
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {
        f"{node.module}.{alias.name}" if node.module and not node.level else ""
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return not text or bool(words & _WORDS) or any(map(_may_read, modules))


def _may_read(module: str) -> bool:
    top = module.partition(".")[0]
    is_known = top in _READ_NO_ARGUMENTS and not module.endswith(("argv", "orig_argv"))
    return not is_known or any(f"{module}.".startswith(f"{name}.") for name in _READ_ARGUMENTS)
