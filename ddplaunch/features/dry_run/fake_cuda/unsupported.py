"""Exits a worker whose script uses CUDA functions that fake CUDA does not support.

Runs in a worker of a dry run. Writes one line and exits with ``NEEDS_GPU``; where the script has not caught an
exception of torch for want of a GPU, after its traceback. The line names the call, the script's line, the innermost
line of a library, the reason, and what to do.
Never raises: a script could catch the exception, and its next collective would wait for the other ranks for ever.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ddplaunch.errors import NEEDS_GPU

if TYPE_CHECKING:
    from types import TracebackType

unsupported_calls: set[str] = set()
"""Names of all unsupported functions and classes."""

_PACKAGE_FOLDER = str(Path(__file__).parents[3]) + os.sep
_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_TRITON_FOLDERS = tuple(f"{folder}triton{os.sep}" for folder in _PACKAGES)
_MAX_ERROR_CHARS = 300
_WRAPPERS = {"wrapper", "decorate_context", "_wrapped_call_impl", "_call_impl"}
"""Functions of torch that only call another one, which the script's line names."""
_SKIP = "skip it in a dry run, where torch.cuda.get_device_name() contains 'simulated'"
_REASONS = (
    ("no module named 'triton", "", "install Triton here, too: it needs no GPU before a kernel starts"),
    (
        "triton kernel",
        "Triton compiles for GPUs only",
        "choose an implementation without Triton; many libraries do where it is not installed",
    ),
    (
        r"cuda\.?graph|accelerator\.graph|graph_pool|graphed_callables",
        "a graph is work that a GPU has recorded",
        "run it without graphs in a dry run",
    ),
    ("ipc_handle", "a handle names an event of a GPU", _SKIP),
    (
        "symmetric_memory|symm_mem",
        "a kernel on one GPU uses the memory of the others",
        "use process groups in a dry run",
    ),
    ("nccl", "NCCL connects GPUs only", "use torch.distributed.new_group, which a dry run simulates"),
    (r"cuda\.comm\b", "it copies between several GPUs of one process", _SKIP),
    ("cpp_extension", "CUDA sources run on GPUs only", _SKIP),
    ("jiterator", "CUDA sources run on GPUs only", _SKIP),
    ("external_?stream|stream_from_external", "a library made this stream on a GPU", _SKIP),
    ("mem_?pool|allocator", "it manages the memory of a GPU", _SKIP),
    ("", "the CPU has no counterpart", _SKIP),
)
"""A pattern for a part of the call or the error, in lower case; why that needs a GPU; what to do. The first that fits
holds."""
_NO_GPU_MESSAGES = (
    "Torch not compiled with CUDA",
    "PyTorch was compiled without CUDA",
    "not linked with support for cuda",
    "Cannot access accelerator device",
    "from the 'CUDA' backend",
    "from the 'CPU' backend",
    "supported on CPU",
    "backward on CPU",
    "_for_cpu",  # A CPU operator without a counterpart of something that CUDA's has.
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
    "'_cuda_",  # ... has torch._C no attribute, or nothing to import
    "could not create a primitive",
    "without ATen_cuda library",
    "CUDA_HOME environment variable is not set",
    "on non-CUDA tensor type",
    "the cuda array interface",  # Numba's
    "CUDA driver library cannot be found",  # Numba's
    "Found no NVIDIA driver",
    "no CUDA-capable device",
    "CUDA driver version is insufficient",
    "active drivers",
    "No module named 'triton",
    "have NCCL built in",
    "gloo does not support",
    "with Gloo",
)
"""Parts of the messages of torch and Triton where there is no GPU, for calls that fake CUDA does not replace."""


def unsupported_function(call: str) -> Callable[..., NoReturn]:
    """A replacement for function ``call`` that exits the worker."""
    unsupported_calls.add(call)

    def unsupported(*_args: Any, **_kwargs: Any) -> NoReturn:
        exit_unsupported(call, traceback.extract_stack())

    return unsupported


def unsupported_class(call: str) -> type:
    """A replacement for class ``call`` that exits the worker when constructed; type hints and ``isinstance`` work."""
    exit_worker = unsupported_function(call)

    class MetaClass(type):
        __call__ = exit_worker

        def __getattr__(cls, name: str) -> NoReturn:
            if name.startswith("_"):  # Python's tools read such attributes of any class.
                raise AttributeError(name)
            exit_worker()

    module, _, short = call.rpartition(".")
    return MetaClass(short, (), {"__module__": module})


def excepthook(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For ``sys.excepthook``: after the traceback, exit as unsupported if the exception means that there is no GPU."""
    if not any(part in str(error) for part in _NO_GPU_MESSAGES):
        sys.__excepthook__(error_type, error, trace)
        return
    # Torch's hook, around this one, would print what is written to sys.stderr only afterwards.
    traceback.print_exception(error_type, error, trace, file=sys.__stderr__)
    frame = _script_frame(traceback.extract_tb(trace))
    with contextlib.suppress(OSError, KeyError):
        # The bootstrap has recorded the exception as the script's failure.
        os.unlink(os.environ["TORCHELASTIC_ERROR_FILE"])
    headline = f"{error_type.__name__}: {error}".splitlines()[0].partition(". ")[0][:_MAX_ERROR_CHARS]
    exit_unsupported(_called_from(frame, trace), traceback.extract_tb(trace), headline)


def exit_unsupported(call: str, frames: traceback.StackSummary, error: str = "") -> NoReturn:
    """Write one line about ``call``, made from ``frames``, with torch's ``error``, and exit with ``NEEDS_GPU``."""
    script, library = _script_frame(frames), _library_frame(frames)
    where = f"{script.filename}:{script.lineno}: " if script else ""
    through = f", called by {library.filename}:{library.lineno}" if library and library != script else ""
    said = f"{call} {error}".lower()
    why, advice = next((why, advice) for part, why, advice in _REASONS if re.search(part, said))
    reason = f" ({error})" if error else f": {why}"
    line = f"ddplaunch: {where}{call}{through} needs a real GPU{reason}; {advice}\n"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.write(2, line.encode("utf-8", "backslashreplace"))
    os._exit(NEEDS_GPU)


def _script_frame(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost frame of the script; without one, the innermost frame of a library other than torch."""
    outside = [frame for frame in frames if not frame.filename.startswith((_PACKAGE_FOLDER, _TORCH_FOLDER, "<"))]
    script = getattr(sys.modules.get("__main__"), "__file__", None)  # May be a library's, too.
    of_script = [frame for frame in outside if frame.filename == script or not frame.filename.startswith(_LIBRARIES)]
    found = of_script or outside
    return found[-1] if found else None


def _library_frame(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost frame of a library that is neither torch nor Triton."""
    own = (_PACKAGE_FOLDER, _TORCH_FOLDER, *_TRITON_FOLDERS)
    found = [frame for frame in frames if frame.filename.startswith(_PACKAGES) and not frame.filename.startswith(own)]
    return found[-1] if found else None


def _called_from(frame: traceback.FrameSummary | None, trace: TracebackType | None) -> str:
    """Name of the function that the script's line called; the line itself if it called no Python function."""
    while trace and frame and (trace.tb_frame.f_code.co_filename, trace.tb_lineno) != (frame.filename, frame.lineno):
        trace = trace.tb_next
    while trace and trace.tb_next:
        trace = trace.tb_next
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__", "")
        if code.co_name not in _WRAPPERS and not code.co_filename.startswith(_PACKAGE_FOLDER):
            return f"{module}.{code.co_name}".removeprefix(".")
    return f"`{linecache.getline(frame.filename, frame.lineno or 0).strip()}`" if frame else "a call"
