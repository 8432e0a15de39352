"""Lets a feature change a module when the script imports it, and act in processes that the script spawns.

No module is loaded ahead only to be changed.

Runs in a worker, in the thread that imports. Features use it, and only they.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
    from types import ModuleType

    Patch = Callable[[ModuleType], None]
else:
    Loader = object  # ``importlib.abc`` loads 15 modules, among them random and tempfile.


def after_import(name: str, patch: Patch) -> None:
    """Call ``patch`` with module ``name``: now if it is loaded, otherwise when the script imports it."""
    if name in sys.modules:
        patch(sys.modules[name])
        return
    finder = next((each for each in sys.meta_path if isinstance(each, _PatchFinder)), None)
    if finder is None:
        finder = _PatchFinder()
        sys.meta_path.insert(0, finder)
    finder.patches.setdefault(name, []).append(patch)


def in_children(name: str, call: Callable[[], tuple[Callable[..., object], tuple[object, ...]]]) -> None:
    """Have each process that multiprocessing spawns, or its forkserver starts, do something before all else.

    ``call`` returns a function and its arguments, which that process unpickles and calls. ``name`` is unique.
    """

    def patch(spawn: Any) -> None:
        original = spawn.get_preparation_data
        spawn.get_preparation_data = lambda *args, **kwargs: {name: _Called(call), **original(*args, **kwargs)}

    after_import("multiprocessing.spawn", patch)


class _Called:
    """What a process calls when it unpickles this."""

    def __init__(self, call: Callable[[], tuple[Callable[..., object], tuple[object, ...]]]) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call()


class _PatchFinder:
    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.patches:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec and spec.loader:
            spec.loader = _PatchLoader(spec.loader, self.patches[fullname])
        return spec


class _PatchLoader(Loader):
    """Stands in for a module's loader until the module is loaded."""

    def __init__(self, loader: Loader, patches: list[Patch]) -> None:
        self._loader, self._patches = loader, patches

    def __getattr__(self, name: str) -> Any:
        """What a loader may also have, such as ``get_code`` for ``python -m``."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for patch in self._patches:
            patch(module)
