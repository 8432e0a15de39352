"""Exits a forked worker like the interpreter, without destroying modules.

Runs in the worker, as the last atexit function. A normal shutdown destroys every module and so unshares all pages that
the worker shares with the forkserver: 0.3 s of kernel time per worker. Keeps all effects that a script can see: joined
threads, atexit functions, ``__del__`` methods, written buffers, the exit code. Must not run destructors of C++
libraries: ProcessGroupGloo's, whose last owner is a DDP module, can wait for ever for a thread that waits for the GIL,
which only a real shutdown would end.
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
    """Register the exit function. Call it in the forkserver before its imports: atexit runs the first one last."""
    atexit.register(_finish)


def _register_again() -> None:
    """Register the exit function again if a profiler has run, and so removed, all atexit functions before the end."""
    if not atexit._ncallbacks():
        register()


def reset_finalizers() -> None:
    """Reset the finalizers that run at exit. Call it in a forked worker, before the script."""
    # Finalizers from the imports, hundreds of torch.library among them, belong to objects that all workers share. With
    # this reset the script's first finalizer registers itself with atexit as in a new process.
    for finalizer in getattr(weakref.finalize, "_registry", {}):
        finalizer.atexit = False
    atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _finish() -> None:
    """The last atexit function; it also runs in a child that the script has forked and that exits normally."""
    code = bootstrap.exit_code
    if code is None:
        bootstrap.after_script = _register_again
        return
    flushed = all([_flush(name) for name in ("stdout", "stderr")])
    _restore_defaults()
    _finalize_objects()
    ctypes.CDLL(None).fflush(None)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code if flushed else _FLUSH_FAILED)


def _flush(name: str) -> bool:
    """Like CPython's flush_std_files: a failure changes the exit code and, for stdout, is printed."""
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


def _restore_defaults() -> None:
    """Remove signal handlers and hooks, and silence remaining threads: only finalizers of the script still run."""
    threading.excepthook = lambda _: None
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for name in ("stdin", "stdout", "stderr", "displayhook", "excepthook", "unraisablehook"):
        setattr(sys, name, getattr(sys, f"__{name}__"))


def _finalize_objects() -> None:
    """Call the finalizers of all objects made since the fork; those of files last, the outermost file first."""
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
    # The garbage collector's call: at most once per object, and exceptions are printed as "ignored".
    ctypes.pythonapi.PyObject_CallFinalizer(ctypes.py_object(item))


def _is_running(item: object) -> bool:
    """Whether the object is a generator or coroutine that another thread executes."""
    return (isinstance(item, GeneratorType) and item.gi_running) or (
        isinstance(item, CoroutineType) and item.cr_running
    )


def _may_be_closed(file: io.IOBase) -> bool:
    """Whether closing may write buffered bytes and cannot block; the standard streams are flushed already."""
    if isinstance(file, io.RawIOBase) or file.fileno() <= 2:
        return False
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode) or threading.active_count() == 1
