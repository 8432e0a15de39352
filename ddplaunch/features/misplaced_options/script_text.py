"""Whether a script may read its arguments, as far as its text shows it. Runs in the launcher."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddplaunch.system.files import kept_files

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

_MAX_BYTES = 1 << 20

_READ_NO_ARGUMENTS = sys.stdlib_module_names | {
    *("numpy", "scipy", "pandas", "sklearn", "torch", "torchvision", "torchaudio"),
    *("matplotlib", "PIL", "tqdm", "yaml", "psutil", "requests"),
}
_READ_ARGUMENTS = {"argparse", "optparse", "getopt", "fileinput", "unittest", "importlib", "runpy", "torch.testing"}
_WORDS = {"argv", "orig_argv", "exec", "eval", "__import__"}


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
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    words = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in nodes}
    modules = {module for node in nodes for module in _imported(node)}
    return not text or bool(words & _WORDS) or any(map(_may_read, modules))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" if node.module and not node.level else "" for alias in node.names)


def _may_read(module: str) -> bool:
    top = module.partition(".")[0]
    is_known = top in _READ_NO_ARGUMENTS and not module.endswith(("argv", "orig_argv"))
    return not is_known or any(f"{module}.".startswith(f"{name}.") for name in _READ_ARGUMENTS)
