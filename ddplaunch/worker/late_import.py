"""Hides the preloaded torch in a forked worker until the script imports it, and then notices what it has set for torch.

Runs in the worker, in the thread that imports.

In a new process torch reads its environment variables when the script imports it; here it has read them before the
fork.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = object  # ``importlib.abc`` loads 15 modules, among them random and tempfile.

_names: tuple[str, ...] = ()
_modules_seen = 0


def choose_modules() -> None:
    """In the forkserver, when torch is loaded: choose the modules to hide, which are torch and its packages.

    Not in a worker: it would write to the reference counts of all modules, and so get 4 MB of memory of its own. In a
    forkserver that was forked from a keeper only if modules were loaded since: it would take 5 ms.
    """
    global _names, _modules_seen
    if _modules_seen == len(sys.modules):
        return
    _modules_seen = len(sys.modules)
    _names = tuple(name for name, module in sys.modules.items() if _is_chosen(name, module))


def _is_chosen(name: str, module: ModuleType) -> bool:
    is_package = name.startswith("torch.") and name.count(".") <= 2 and hasattr(module, "__path__")
    return name == "torch" or is_package


def hide_torch() -> None:
    """Remove the chosen modules from ``sys.modules``, as if not loaded; the next import of torch puts them back."""
    hidden = {name: sys.modules[name] for name in _names if name in sys.modules}
    if "torch" in hidden:
        for name in hidden:
            del sys.modules[name]
        sys.meta_path.insert(0, _Hidden(hidden, dict(os.environ)))


class _Hidden(Loader):
    """Finds the hidden torch, once."""

    def __init__(self, modules: dict[str, ModuleType], environ: Mapping[str, str]) -> None:
        self._modules, self._environ = modules, environ
        self._spec = modules["torch"].__spec__

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        spec = copy.copy(self._spec)
        assert spec
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        _apply(module, self._environ)


def _apply(torch: Any, before: Mapping[str, str]) -> None:
    """Give variables that have changed since ``before`` their effect on torch; rank 0 warns where that is too late."""
    from ddplaunch.worker import preload  # Only a forked worker needs it, in which it is loaded.

    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    late = [name for name in sorted(changed) if preload.is_read_at_import(name) and not _is_applied(torch, name)]
    if late and os.environ.get("RANK", "0") == "0":
        what = f"the script changed {', '.join(late)} before it imported torch, but torch had read it: no effect"
        print(f"ddplaunch: warning: {what}. Use --start-method spawn.", file=sys.stderr)


def _is_applied(torch: Any, name: str) -> bool:
    with contextlib.suppress(Exception):
        if name in _SETTERS:
            _SETTERS[name](torch)
            return True
    return False


_SETTERS: dict[str, Callable[[Any], object]] = {
    "OMP_NUM_THREADS": lambda torch: torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"])),
    "TORCH_LOGS": lambda torch: torch._logging._internal._init_logs(),
    "TORCH_DISTRIBUTED_DEBUG": lambda torch: torch.distributed.set_debug_level_from_env(),
}
"""Variable -> what gives its present value an effect."""
