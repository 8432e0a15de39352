"""Ends a worker whose script asks for what only a GPU can do: one line that names the call and the script's line."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ddplaunch.errors import NEEDS_GPU

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

calls: set[str] = set()
"""All that are refused by name."""

_OWN_FOLDER = str(Path(__file__).parents[2]) + os.sep
_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SIGNS = (
    "Torch not compiled with CUDA",
    "PyTorch was compiled without CUDA",
    "not linked with support for cuda",
    "Cannot access accelerator device",
    "from the 'CUDA' backend",
    "from the 'CPU' backend",
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
    "'_cuda_",  # ... has torch._C no attribute, or nothing to import
    "could not create a primitive",
    "without ATen_cuda library",
    "CUDA_HOME environment variable is not set",
    "Found no NVIDIA driver",
    "no CUDA-capable device",
    "CUDA driver version is insufficient",
    "active drivers",
    "No module named 'triton",
    "have NCCL built in",
    "gloo does not support",
    "with Gloo",
)
"""What torch and Triton say where there is no GPU, for calls that the rehearsal does not know."""


def refusing(call: str) -> Callable[..., NoReturn]:
    """A function to stand for ``call``."""
    calls.add(call)

    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        frames = traceback.extract_stack()
        end(call, _script_frame(frames))

    return refused


def refusing_class(call: str) -> type:
    """A class to stand for ``call``, so that what only names it in a type or an ``isinstance`` goes on."""
    refuse = refusing(call)

    class Kind(type):
        __call__ = refuse

        def __getattr__(cls, name: str) -> NoReturn:
            if name.startswith("_"):  # Asked by Python's tools, of any class.
                raise AttributeError(name)
            refuse()

    module, _, short = call.rpartition(".")
    return Kind(short, (), {"__module__": module})


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For ``sys.excepthook``: an uncaught exception that says there is no GPU is a call that was not foreseen."""
    if not any(sign in str(error) for sign in _SIGNS):
        sys.__excepthook__(kind, error, trace)
        return
    frames = traceback.extract_tb(trace)
    place = _script_frame(frames)
    with contextlib.suppress(OSError, KeyError):
        # The bootstrap has recorded it, and it is no failure of the script's.
        os.unlink(os.environ["TORCHELASTIC_ERROR_FILE"])
    end(_called_from(place, trace), place)


def end(call: str, place: traceback.FrameSummary | None) -> NoReturn:
    """Not by an exception, which the script might catch, or answer with a collective that others never join."""
    where = f"{place.filename}:{place.lineno}: " if place else ""
    line = f"ddplaunch: {where}{call} needs a real GPU, a dry run cannot rehearse it; leave it out of a dry run\n"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.write(2, line.encode("utf-8", "backslashreplace"))
    os._exit(NEEDS_GPU)


def _script_frame(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost that is the user's; if there is none, the innermost that is a library's on their behalf."""
    known = [frame for frame in frames if not frame.filename.startswith((_OWN_FOLDER, _TORCH_FOLDER, "<"))]
    own = [frame for frame in known if not frame.filename.startswith(_LIBRARIES)]
    found = own or known
    return found[-1] if found else None


def _called_from(place: traceback.FrameSummary | None, trace: TracebackType | None) -> str:
    """The function that the script's line called, or the line itself where that was no Python function."""
    while trace and place and (trace.tb_frame.f_code.co_filename, trace.tb_lineno) != (place.filename, place.lineno):
        trace = trace.tb_next
    inner = trace.tb_next if trace else None
    if inner:
        function = inner.tb_frame.f_code.co_name
        return f"{inner.tb_frame.f_globals.get('__name__', '')}.{function}".removeprefix(".")
    return f"`{linecache.getline(place.filename, place.lineno or 0).strip()}`" if place else "a call"
