"""How the rehearsal puts something of its own in a name's place, and how it tells the script's calls from torch's.

Importing this changes nothing; only ``rehearsal.install`` calls it, in a worker of a dry run.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from importlib.abc import MetaPathFinder
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec

_PACKAGE = __name__.rpartition(".")[0]
_everywhere: dict[int, tuple[Any, Any]] = {}
"""What was replaced and by what, by the identity of the former, which is held so that nothing else can have it."""


def replace(name: str, new: Any, everywhere: bool = True) -> None:
    """Put ``new`` under ``name``, and by ``spread`` wherever torch has imported the same object from there."""
    owner_name, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    old = vars(owner).get(attribute, getattr(owner, attribute, None))
    if everywhere and callable(old) and isinstance(owner, ModuleType):
        _everywhere[id(old)] = (old, new)
    setattr(owner, attribute, new)


def wrap(name: str, around: Callable[..., Any], everywhere: bool = True) -> None:
    """Let ``around(original, *args, **kwargs)`` answer for ``name``; nothing where this torch does not have it."""
    try:
        original = pkgutil.resolve_name(name)
    except AttributeError:
        return

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    replace(name, stand_in, everywhere)
    _know_to_torchscript(original, stand_in)


def replace_class(name: str, make: Callable[..., Any]) -> None:
    """Let ``make(original, ...)`` construct for class ``name``, of which every old instance stays an instance."""
    original = pkgutil.resolve_name(name)

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        return make(original, *args, **kwargs)

    module, _, short = name.rpartition(".")
    stand_in = Kind(short, (), {"__new__": construct, "__module__": module, "__doc__": original.__doc__})
    replace(name, stand_in, everywhere=False)
    _know_to_torchscript(original, stand_in)


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call ``action`` once ``module`` is there: now, or after its import, which here would cost seconds."""
    if module in sys.modules:
        action()
        return
    if not _later:
        sys.meta_path.insert(0, _Finder())
    _later[module] = action


_later: dict[str, Callable[[], None]] = {}


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _later:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                _later.pop(fullname)()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def spread() -> None:
    """Replace also what torch's modules have imported by name from each other."""
    for module_name, module in list(sys.modules.items()):
        if is_torch(module_name) and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in _everywhere:
                    setattr(module, name, _everywhere[id(value)][1])


def _know_to_torchscript(original: Any, stand_in: Any) -> None:
    """TorchScript compiles what it knows by identity, and would look for the source of anything else."""
    operator = torch.jit._builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if operator:
        torch.jit._builtins._register_builtin(stand_in, operator)


def is_torch(module_name: str) -> bool:
    return module_name == "torch" or module_name.startswith("torch.")


def asked_by_script() -> bool:
    """Whether the caller of the rehearsal is not torch's own code, which must see what tensors really are."""
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None and not is_torch(frame.f_globals.get("__name__", ""))
