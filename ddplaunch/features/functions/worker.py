"""Calls the function that ``launch`` was given, and writes what it returns to a file in the worker's folder.

Runs in the worker, in place of a script. It unpickles what its launcher has sent, and nothing else. Must not import
torch.
"""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import sys
from multiprocessing import process, spawn
from typing import Any

from ddplaunch.features.collect_logs.records import RESULT_FILE
from ddplaunch.features.functions import FunctionCall
from ddplaunch.protocol import wire
from ddplaunch.protocol.agent_entry import TEXT_FD
from ddplaunch.system.files import kept_files
from ddplaunch.worker.parts import WorkerPart


class Function(WorkerPart):
    """The function; a class so that the frame below it is this module's, which tracebacks leave out."""

    def __init__(self, folder: str) -> None:
        """Read the call from its descriptor. The worker's ``folder`` gets the value; empty: there is none."""
        self.function = self
        with open(TEXT_FD, "rb") as file:
            self._call: FunctionCall = wire.decode(file.read(), (FunctionCall,))
        self._folder = folder
        sys.argv = list(self._call.argv)
        sys.path[:0] = [path for path in self._call.search_path if path not in sys.path]

    def __call__(self) -> None:
        pickler = _pickler(self._call)
        _import_main(self._call)
        function, args, kwargs = pickle.loads(base64.b64decode(self._call.pickled))
        _write(_dumps(pickler, function(*args, **kwargs)), self._folder)


def _pickler(call: FunctionCall) -> Any:
    """The module that pickles the value: the one that has pickled the function."""
    if not call.by_value:
        return pickle
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if own != call.python:
        raise RuntimeError(f"Python {call.python} has pickled this function by value, and Python {own} cannot load it")
    return importlib.import_module("cloudpickle")


def _import_main(call: FunctionCall) -> None:
    """Import the launcher's script as ``__mp_main__``, as multiprocessing does: its guarded part does not run."""
    names = {"init_main_from_path": call.main_path, "init_main_from_name": call.main_module}
    current: Any = process.current_process()
    current._inheriting = True  # ``launch`` and multiprocessing refuse to start something meanwhile.
    try:
        spawn.prepare({key: name for key, name in names.items() if name})
    finally:
        del current._inheriting


def _dumps(pickler: Any, value: object) -> bytes:
    try:
        data: bytes = pickler.dumps(value)
    except Exception as error:
        raise TypeError(f"the function returned a {type(value).__name__} that cannot be pickled: {error}") from None
    return data


def _write(data: bytes, folder: str) -> None:
    """Write the file, which has its name once it is complete."""
    if not folder:
        raise OSError("the value of the function cannot be returned: this worker has no folder")
    kept_files.write_whole(os.path.join(folder, RESULT_FILE), data)


part = Function
