"""Patches torch: replaces and wraps names, and distinguishes calls by the script from calls by torch's own code.

Runs in a worker of a dry run, called by ``install`` of this package. Importing this module patches nothing.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch

from ddplaunch.features import worker_patches

_PACKAGE = __name__.rpartition(".")[0]
_SEE_GPUS = ("torch._tensor_str", "torch.distributed._shard.")
"""Modules of torch that see what the script sees: one prints tensors, others compare devices with the script's."""
_replacements: dict[int, tuple[Any, Any]] = {}
"""id of the replaced object -> the object and its replacement. The reference prevents reuse of the id."""


def replace(name: str, new: Any, everywhere: bool = True) -> None:
    """Set ``name`` to ``new``; ``everywhere``: ``replace_imported_names`` then also sets torch's imports of it."""
    owner_name, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    old = vars(owner).get(attribute, getattr(owner, attribute, None))
    if everywhere and callable(old) and isinstance(owner, ModuleType):
        _replacements[id(old)] = (old, new)
    setattr(owner, attribute, new)


def wrap(name: str, around: Callable[..., Any], everywhere: bool = True) -> None:
    """Replace function ``name`` by ``around(original, *args, **kwargs)``; no effect if this torch has no such name."""
    try:
        original = pkgutil.resolve_name(name)
    except AttributeError:
        return

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    replace(name, patched, everywhere)
    _register_with_torchscript(original, patched)


def replace_class(name: str, make: Callable[..., Any]) -> None:
    """Replace the constructor of class ``name`` by ``make(original, ...)``; ``isinstance`` works as before."""
    original = pkgutil.resolve_name(name)

    class MetaClass(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        return make(original, *args, **kwargs)

    module, _, short = name.rpartition(".")
    patched = MetaClass(short, (), {"__new__": construct, "__module__": module, "__doc__": original.__doc__})
    replace(name, patched, everywhere=False)
    _register_with_torchscript(original, patched)


def arguments_by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, including those of ``**kwargs``."""
    named = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    rest = named.pop("kwargs", {})
    return {**named, **rest}


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call ``action`` after the import of ``module``, at once if it is imported already. Does not import it."""
    worker_patches.after_import(module, lambda _module: action())


def replace_imported_names() -> None:
    """Apply the replacements to names that torch's modules imported from each other."""
    for module_name, module in list(sys.modules.items()):
        if is_torch(module_name) and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in _replacements:
                    setattr(module, name, _replacements[id(value)][1])


def _register_with_torchscript(original: Any, patched: Any) -> None:
    """TorchScript recognises builtins by identity, and would search for the source of any other function."""
    operator = torch.jit._builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if operator:
        torch.jit._builtins._register_builtin(patched, operator)


def is_torch(module_name: str) -> bool:
    """Whether the module belongs to torch."""
    return module_name == "torch" or module_name.startswith("torch.")


def called_by_script() -> bool:
    """Whether the caller of this package is the script or a library; False for torch, which must see the CPU."""
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    caller = "torch" if frame is None else frame.f_globals.get("__name__", "")
    return caller.startswith(_SEE_GPUS) or not is_torch(caller)
