"""Selects the modules that the forkserver imports once for all workers, from the script's source, and imports them.

Runs in the forkserver. Must not import anything that starts a thread or uses a GPU.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Iterator, Mapping

from ddplaunch.protocol.agent_entry import MAX_MESSAGE_CHARS
from ddplaunch.text import cut

ALWAYS = ("torch", "torch.distributed")

_DYNAMO_WORDS = ("DistributedDataParallel", "DDP", "optim", "compile", "fully_shard", "FullyShardedDataParallel")
"""Names whose first use, not import, makes torch 2.x import torch._dynamo (0.9 s, as long as torch itself), in every
worker."""

_READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH")
"""Prefixes of variables that torch and its libraries read when they load."""

_READ_LATER = ("TORCH_NCCL_", "TORCH_FR_", "TORCH_HOME", "TORCHELASTIC_")


def module_file(name: str) -> str | None:
    """The file that ``python -m name`` runs, found without an import; None without the module.

    Empty if it has no file, or if that is known only to who imports its packages. A package may change its ``__path__``
    when it is imported: then a module that exists is not found here.
    """
    found, folders = None, None
    for part in itertools.accumulate(name.split("."), "{}.{}".format):
        finders = (finder.find_spec(part, folders) for finder in sys.meta_path)
        try:
            found = next(filter(None, finders), None)
        except Exception:  # A namespace in a package has no path before it is imported; finders may be the user's.
            return ""
        if found is None:
            return None
        folders = found.submodule_search_locations
    if folders is not None:
        return module_file(f"{name}.__main__")
    return found.origin if found and found.has_location else ""


def modules_for(source: bytes) -> tuple[str, ...]:
    """The modules of torch that a worker imports when it runs ``source``; only ``ALWAYS`` if that cannot be parsed.

    Other packages need ``--preload``: their import may start threads or use a GPU.
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
    """The first environment variable that ``source`` sets and torch reads at import; empty if there is none.

    An import before the script runs would be too early for such a variable. Only the script's file is examined; see
    ``late_import`` for variables that other modules set.
    """
    for statement in _parsed(source).body:
        if any(name.split(".")[0] == "torch" for name in _imports(statement)):
            return ""
        for name in _variables_changed(statement, environ):
            if is_read_at_import(name):
                return name
    return ""


def is_read_at_import(variable: str) -> bool:
    """Whether torch, or a library of it, reads the variable when it loads."""
    return variable.startswith(_READ_AT_IMPORT) and not variable.startswith(_READ_LATER)


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


def try_import(module: str) -> BaseException | None:
    """Import ``module``; return the exception if that fails."""
    try:
        importlib.import_module(module)
    except BaseException as error:
        return error
    return None


def describe(error: BaseException) -> str:
    """The end of the traceback of a failed import, without frames of importlib and of this module."""
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list([frame for frame in shown.stack if not _is_ours(frame)][-3:])
    return cut("".join(shown.format(chain=False)), MAX_MESSAGE_CHARS)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename in (__file__, importlib.__file__) or frame.filename.startswith("<frozen importlib")


def hiding_file(error: BaseException, folder: str) -> str:
    """The file in ``folder`` that was imported in place of a module that torch needs; empty if there is none.

    torch itself imports no file of the script's folder. An empty ``folder``: the script has none.
    """
    loaded = [getattr(module, "__file__", None) or "" for module in tuple(sys.modules.values())]
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((path for path in (*frames, *loaded) if folder and os.path.dirname(path) == folder), "")


@contextlib.contextmanager
def first_in_path(folder: str) -> Iterator[None]:
    """Put ``folder`` first in ``sys.path`` in the block, as for the script; not if it is empty, nor with -P."""
    if not folder or getattr(sys.flags, "safe_path", False):  # -P is new in Python 3.11.
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # An imported module may have removed it.
            sys.path.remove(folder)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Switch off garbage collection in the block, and exempt all objects made there from later collections.

    During imports the collector finds nothing and takes a tenth of the time. In a fork it would unshare the pages of
    the imported objects.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        if not gc.get_threshold()[0]:  # Else an imported module has set thresholds.
            gc.set_threshold(*thresholds)
