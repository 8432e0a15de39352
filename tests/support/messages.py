"""The texts of errors and warnings of runs, as they stand in the code: those of which docs/errors.md has an entry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[2] / "ddplaunch"

_TEXT_OF = {
    "LaunchError": 0,
    "AgentFailed": 0,
    "AttemptFailure": 0,
    "ConfigError": 0,
    "JoinRefused": 0,
    "ConnectFailed": 1,
    "HostFailure": 2,
    "Notice": 0,
    "StartNotice": 1,
}
"""What gets a text, and as which argument. Of notices only warnings count."""

_REASONS = {"RuntimeError": 0, "on_lost": 1, "count_as_lost": 1}
"""The same, in the modules that find the rendezvous and lose nodes."""

_WITH_REASONS = ("rendezvous/connect.py", "launcher/pings.py", "launcher/lost_nodes.py")

_YIELD_WARNINGS = ("features/schedulers/checks.py", "features/slurm/reader.py")

_COMMANDS = ("check", "come_back", "functions", "page", "plan", "ps", "runs")
_NOT_OF_RUNS = (
    *(f"features/{name}/" for name in _COMMANDS),
    "features/hangs/stacks.py",
    "features/health/node_memory.py",
    "cli/",
)
"""Commands that are no run, functions, and the command line, whose errors are wrong usage."""


def of_runs() -> set[str]:
    """Each text that has at least two words of its own, with ``...`` for what is filled in."""
    found: set[str] = set()
    for path in _PACKAGE.rglob("*.py"):
        name = str(path.relative_to(_PACKAGE))
        if not name.startswith(_NOT_OF_RUNS):
            text_of = _TEXT_OF | (_REASONS if name in _WITH_REASONS else {})
            found.update(_of_module(ast.parse(path.read_text()), text_of, has_yields=name in _YIELD_WARNINGS))
    return {text for text in found if len(re.findall("[A-Za-z]{2,}", text)) > 1}


def _of_module(tree: ast.Module, text_of: dict[str, int], *, has_yields: bool) -> Iterator[str]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            assigned = _assigned(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield from _of_call(node, text_of, assigned)
                elif has_yields and isinstance(node, ast.Yield) and node.value:
                    yield from map(_shown, _texts(node.value, assigned))


def _of_call(call: ast.Call, text_of: dict[str, int], assigned: dict[str, list[ast.expr]]) -> Iterator[str]:
    name = _name(call.func)
    if name in text_of and len(call.args) > text_of[name]:
        is_warning = name == "StartNotice" and ast.unparse(call.args[0]) == "'warning'"
        for text in map(_shown, _texts(call.args[text_of[name]], assigned)):
            if is_warning or not name.endswith("Notice") or text.startswith("warning: "):
                yield text


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", None) or getattr(function, "id", "")


def _assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _texts(node: ast.AST, assigned: dict[str, list[ast.expr]]) -> Iterator[str]:
    """What an expression may be, as far as it is written out in its function."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(_part(each, assigned) for each in values)
        case ast.IfExp(body=body, orelse=other):
            yield from (*_texts(body, assigned), *_texts(other, assigned))
        case ast.BinOp(left=left):
            yield from (f"{text}..." for text in _texts(left, assigned))
        case ast.Name(id=name):
            yield from (text for each in assigned.get(name, ()) for text in _texts(each, {}))


def _part(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> str:
    """A part of an f-string: ``...``, or the beginning of the text if that was made before."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=ast.Name(id="text", ctx=ast.Load()) as name):
            return next(_texts(name, assigned), "...")
    return "..."


def _shown(text: str) -> str:
    return re.sub(r"(\.\.\.)+", "...", " ".join(text.partition("\n")[0].split()))
