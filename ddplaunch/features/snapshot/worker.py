"""Has a worker import its code from the snapshot. Runs in the worker, before the script. Imports little."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from ddplaunch.worker.parts import WorkerPart


class RunsSnapshot(WorkerPart):
    """Replaces the folders of the code by their copies, wherever Python looks for modules."""

    def __init__(self, text: str) -> None:
        """``text``: a JSON list, the copy and the folders of which it is the copy."""
        self._copy, *self._roots = [str(os.path.realpath(path)) for path in json.loads(text)]

    def before_script(self) -> None:
        """The working directory stays the user's: data and checkpoints are there."""
        sys.path[:] = map(self._copy_of, sys.path)
        for mapping in _mappings_of_editable_packages():
            for name, path in mapping.items():
                mapping[name] = self._copy_of(path)
                # Processes that the script spawns get ``sys.path`` of this one, but have mappings of their own.
                folder, last = os.path.split(mapping[name])
                if mapping[name] != path and last.removesuffix(".py") == name and folder not in sys.path:
                    sys.path.append(folder)
        sys.path_hooks.insert(0, self._finder_of_copy)
        for path in tuple(sys.path_importer_cache):
            if self._copy_of(path) != path:
                del sys.path_importer_cache[path]
        self._refuse_preloaded()

    def _finder_of_copy(self, path: str) -> Any:
        """A hook of Python's, for folders that the script adds to ``sys.path``, as ``"."``: what finds their copies.

        Raises ImportError if the folder is not copied.
        """
        copy = self._copy_of(path)
        if copy != path:
            for hook in sys.path_hooks:
                with contextlib.suppress(ImportError):
                    return hook(copy)
        raise ImportError(path)

    def _copy_of(self, path: str) -> str:
        """The copy of a file or folder; the path itself if it is not copied, as what git ignores."""
        try:
            real = os.path.realpath(path)  # Of an empty path the working directory, as ``sys.path`` means it.
        except FileNotFoundError:  # That was deleted.
            return path
        for root in self._roots:
            copy = self._copy + real[len(root) :]
            is_inside = real == root or real.startswith(root + "/")
            if is_inside and os.path.exists(copy) and os.path.realpath(copy) == copy:
                return copy
        return path

    def _refuse_preloaded(self) -> None:
        for name, module in tuple(sys.modules.items()):
            path = getattr(module, "__file__", None) or ""
            if path and self._copy_of(path) != path:
                message = f"--preload has imported {name} from {path}, not from the snapshot: leave it out"
                os.write(2, f"ddplaunch: {message}\n".encode("utf-8", "backslashreplace"))
                os._exit(126)


def _mappings_of_editable_packages() -> list[dict[str, str]]:
    """Where the finders that ``pip install --editable`` has installed look for modules, by name (setuptools)."""
    finders: list[Any] = [module for name, module in tuple(sys.modules.items()) if name.startswith("__editable__")]
    return [finder.MAPPING for finder in finders if isinstance(getattr(finder, "MAPPING", None), dict)]


part = RunsSnapshot
