"""Ends a forked worker as the interpreter would, but without taking anything apart.

A normal shutdown destroys every module, and so writes to, and unshares, all pages the worker shares with the
forkserver: 0.3 s of kernel time a worker. What a script can see of a shutdown stays: threads are joined, atexit
functions and its objects' ``__del__`` run, files and buffers are written, the exit code. No destructor of a C++
library runs: it may wait for a thread that waits for the interpreter's lock (ProcessGroupGloo's does, where its last
owner is a module of DDP), for ever. A real shutdown ends such threads; nothing else can.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import stat
import sys
import threading
import traceback
import weakref
from types import CoroutineType, GeneratorType

from ddplaunch.worker import bootstrap

_FLUSH_FAILED = 120


def register() -> None:
    """To be called in the forkserver before its imports: what is registered first runs last."""
    atexit.register(_finish)


def take_over() -> None:
    """To be called in a forked worker: what is to happen at its end starts anew."""
    # Finalizers made at import, torch.library's hundreds among them, look after things that all workers share. The
    # script's first one shall run when it would have if there were none yet.
    for finalizer in getattr(weakref.finalize, "_registry", {}):
        finalizer.atexit = False
    atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _finish() -> None:
    """Runs as the last atexit function, also in a child the script has forked that ends as a script does."""
    code = bootstrap.exit_code
    if code is None:
        return
    flushed = all([_flush(name) for name in ("stdout", "stderr")])
    _let_go()
    _finalize_objects()
    ctypes.CDLL(None).fflush(None)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code if flushed else _FLUSH_FAILED)


def _flush(name: str) -> bool:
    """As CPython's flush_std_files: a failure is told of for stdout, and changes the exit code."""
    stream = getattr(sys, name, None)
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except Exception as error:
        if name == "stdout":
            frames = error.__traceback__ and error.__traceback__.tb_next
            print(f"Exception ignored in: {stream!r}", file=sys.stderr)
            traceback.print_exception(type(error), error, frames)
        return False
    return True


def _let_go() -> None:
    """From here on only finalizers of the script run: no handler, no hook, and threads that are left say nothing."""
    threading.excepthook = lambda _: None
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for name in ("stdin", "stdout", "stderr", "displayhook", "excepthook", "unraisablehook"):
        setattr(sys, name, getattr(sys, f"__{name}__"))


def _finalize_objects() -> None:
    """Call ``__del__`` and its like of all that was made since the fork; files come last, the outermost first."""
    objects = [item for item in gc.get_objects() if hasattr(type(item), "__del__")]
    files = [item for item in objects if issubclass(type(item), io.IOBase)]
    for item in objects:
        if not issubclass(type(item), io.IOBase) and not _is_running(item):
            _finalize(item)
    for file in sorted(files, key=lambda file: (not isinstance(file, io.TextIOBase), type(file).__module__ == "_io")):
        with contextlib.suppress(Exception):
            if _may_be_closed(file):
                _finalize(file)


def _finalize(item: object) -> None:
    # What the collector calls, too: once for each object, and exceptions are told of as "ignored".
    ctypes.pythonapi.PyObject_CallFinalizer(ctypes.py_object(item))


def _is_running(item: object) -> bool:
    """A generator or coroutine that another thread is in."""
    return (isinstance(item, GeneratorType) and item.gi_running) or (
        isinstance(item, CoroutineType) and item.cr_running
    )


def _may_be_closed(file: io.IOBase) -> bool:
    """Its last bytes may have to be written, and that cannot block; the standard streams are flushed already."""
    if isinstance(file, io.RawIOBase) or file.fileno() <= 2:
        return False
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode) or threading.active_count() == 1
