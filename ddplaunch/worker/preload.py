"""Which modules are worth importing once in the forkserver, and whether they may, read from the script's text. Pure."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALWAYS = ("torch", "torch.distributed")

_DYNAMO_WORDS = ("DistributedDataParallel", "DDP", "optim", "compile", "fully_shard", "FullyShardedDataParallel")
"""torch 2.x imports torch._dynamo (0.9 s, as much as torch itself) when one of these is first used, not when it is
imported; every worker would pay for it by itself."""

_READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH")
"""Beginnings of variables that torch and its libraries read when they load."""

_READ_LATER = ("TORCH_NCCL_", "TORCH_HOME")


def modules_for(source: bytes) -> tuple[str, ...]:
    """What a worker that runs ``source`` will import anyway from torch; only ``ALWAYS`` if it cannot be parsed.

    Other packages are left to ``--preload``: importing them may start threads or touch a GPU.
    """
    tree = _parsed(source)
    nodes = list(ast.walk(tree))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    found = {name for node in tree.body for name in _imports(node) if name.startswith("torch.")}
    if names.intersection(_DYNAMO_WORDS) or any(name.startswith("torch.optim") for name in found):
        found.add("torch._dynamo")
    return (*ALWAYS, *sorted(found - set(ALWAYS)))


def early_variable(source: bytes, environ: Mapping[str, str]) -> str:
    """The first environment variable that ``source`` changes for torch to read at its import; empty if there is none.

    An import before the script runs would come too early for it. Only what stands in the script itself is seen.
    """
    for statement in _parsed(source).body:
        if any(name.split(".")[0] == "torch" for name in _imports(statement)):
            return ""
        for name in _variables_changed(statement, environ):
            if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER):
                return name
    return ""


def _parsed(source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _imports(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module]
    return []


def _variables_changed(statement: ast.stmt, environ: Mapping[str, str]) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environ(node.value):
            yield from _constants([node.slice])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _changed_by(node, node.func, environ)


def _changed_by(call: ast.Call, method: ast.Attribute, environ: Mapping[str, str]) -> Iterator[str]:
    if method.attr == "putenv" or (_is_environ(method.value) and method.attr == "pop"):
        yield from _constants(call.args[:1])
    elif _is_environ(method.value) and method.attr == "setdefault":
        yield from (name for name in _constants(call.args[:1]) if name not in environ)
    elif _is_environ(method.value) and method.attr == "update":
        yield from (keyword.arg for keyword in call.keywords if keyword.arg)
        yield from _constants([key for arg in call.args if isinstance(arg, ast.Dict) for key in arg.keys if key])


def _constants(nodes: list[ast.expr]) -> Iterator[str]:
    yield from (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_environ(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "environ"
