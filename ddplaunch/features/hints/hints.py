"""Hints of the failure page: what the user can do about a failure that is well known.

Runs in the launcher, at the end of a run. Pure. Only the exception's type and its first and last line are searched:
any other text of a worker, as the source lines of a traceback, may contain any word.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from ddplaunch.protocol import first_failure

if TYPE_CHECKING:
    from ddplaunch.protocol.results import WorkerExit

_MAX_COLUMNS = 2_000

_LESS_MEMORY = "Use less memory per worker (batch size, DataLoader workers), or fewer workers."
_NO_GPU = "There is no usable GPU: let the script use the CPU and the backend gloo, or try it with --dry-run."
_NCCL_DEBUG = "Set NCCL_DEBUG=INFO for more messages of NCCL."
_RENAME = "If a file {0}.py lies beside the script, it hides the module {0}: rename it."


def _raised(types: str, message: str = "") -> str:
    """Pattern for an exception of one of ``types`` whose message has ``message`` in its first line."""
    return rf"^(?:[\w.]+\.)?(?:{types})" + (f":.*(?:{message})" if message else "(?::|$)")


_HINTS = (
    (
        r"ddplaunch: .* needs a real GPU",
        "A dry run does not simulate this; run this part on a machine with GPUs.",
    ),
    (
        _raised(r"\w+", r"CUDA out of memory|HIP out of memory") + "|" + _raised("OutOfMemoryError"),
        "The GPU's memory is full: lower the batch size, or look for other processes on the GPU (nvidia-smi).",
    ),
    (_raised("MemoryError") + "|" + _raised(r"\w+", r"[Cc]an't allocate memory|Cannot allocate memory"), _LESS_MEMORY),
    (
        _raised(
            r"\w+",
            r"have NCCL built in|has no attribute '_cuda_|ProcessGroupNCCL is only supported with GPUs"
            r"|No CUDA GPUs are available|Torch not compiled with CUDA|Found no NVIDIA driver"
            r"|torch\.cuda\.is_available\(\) is False",
        ),
        _NO_GPU,
    ),
    (
        _raised(r"\w+", r"EADDRINUSE|[Aa]ddress already in use"),
        "Another process listens on that port: leave out --master-port, or stop that process.",
    ),
    (
        _raised("ModuleNotFoundError", r"; '(\w+)' is not a package")
        + "|"
        + _raised("AttributeError|ImportError", r"partially initialized module '(\w+)'")
        + "|"
        + _raised("AttributeError", rf"module '(torch|numpy|{'|'.join(sys.stdlib_module_names)})' has no attribute"),
        _RENAME,
    ),
    (
        _raised("ModuleNotFoundError|ImportError", "No module named"),
        "The module is not installed in the Python environment that ran the script.",
    ),
    (
        _raised("SystemExit", r"python[\d.]*: No module named"),
        "-m takes a module that is installed, or one below the working directory; a file is started without -m.",
    ),
    (
        _raised("SyntaxError|IndentationError", r"\((?![^)]*\.py, )[^<()]+, line \d+\)"),
        "If this is not a Python script, start it with --no-python.",
    ),
    (
        r"^(?:[\w.]+: )?CUDA error: invalid device ordinal",
        "There are more workers than GPUs: lower --nproc-per-node, or check CUDA_VISIBLE_DEVICES.",
    ),
    (
        r"unrecognized arguments: --local[-_]rank",
        "Leave out --pass-local-rank: this script has no such option and can read LOCAL_RANK.",
    ),
    (
        r"arguments are required: .*--local[-_]rank",
        "Put --pass-local-rank before the script: then the script gets --local-rank.",
    ),
    (
        _raised("ProcessRaisedException|ProcessExitedException"),
        "If the script starts one process per GPU by itself (mp.spawn), call the function directly instead: ddplaunch "
        "has started these processes, and RANK, LOCAL_RANK and WORLD_SIZE are in the environment.",
    ),
    (_raised("DistBackendError|RuntimeError", "NCCL|nccl"), _NCCL_DEBUG),
    (
        _raised(r"\w+", r"DataLoader worker .*(killed|exited)"),
        "A DataLoader worker died, often because /dev/shm or the memory is too small.",
    ),
    (
        _raised(r"\w+", r"client socket has timed out") + "|" + _raised("DistNetworkError", "timed out"),
        "Nobody serves that address. A script that starts its own workers (mp.spawn) must first remove "
        "TORCHELASTIC_USE_AGENT_STORE from os.environ.",
    ),
    (_raised(r"\w+", "Too many open files"), "Raise the limit of open files: ulimit -n."),
    (_raised(r"\w+", "No space left on device"), "A disk is full, or /dev/shm is."),
)


def hint(first: WorkerExit, is_dry_run: bool = False) -> str:
    """What can be done about the first failure; empty if that is not known. A dry run has no hints for real GPUs."""
    if first.out_of_memory == "perhaps":
        return "If the kernel sent the signal, `dmesg` names the process; otherwise a user or a job scheduler sent it."
    if first.out_of_memory == "yes":
        return _LESS_MEMORY
    text = _exception(first)
    for pattern, words in _HINTS:
        found = re.search(pattern, text, re.MULTILINE)
        if found and not (is_dry_run and words in (_NO_GPU, _NCCL_DEBUG)):
            return words.format(*filter(None, found.groups()))
    if first.returncode == -9 and not first.ended_by_stop:
        return first_failure.KILLED_IN_DRY_RUN if is_dry_run else first_failure.KILLED_HINT
    return ""


def _exception(first: WorkerExit) -> str:
    """The first and last line of the exception's message; else the last error of the output, or its last line."""
    if first.error:
        lines = first.error.message.strip().splitlines()
        return "\n".join(line[:_MAX_COLUMNS] for line in (*lines[:1], *lines[1:][-1:]))
    return first_failure.last_error(first) or (first.tail[-1][:_MAX_COLUMNS] if first.tail else "")
