"""Resets per-process state after a fork: random seeds, standard streams, thread ids.

Runs in a forked worker, before the script.
"""

from __future__ import annotations

import io
import sys
import threading


def reinitialize() -> None:
    """Set random seeds, standard streams and the main thread's id as a new interpreter does."""
    _reseed()
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _reopened(fd, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # After a fork CPython updates the main thread's ident but not its native id.
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]


def _reopened(fd: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """The stream as ``python -u`` opens it. A stream caches whether its file is seekable, and ``fd`` is a new file."""
    raw = io.FileIO(fd, "wb" if fd else "rb", closefd=False)
    raw.name = old.name
    binary = raw if fd else io.BufferedReader(raw)
    stream = io.TextIOWrapper(binary, old.encoding, old.errors, "\n", write_through=True)
    stream.mode = old.mode  # type: ignore[misc]
    return stream


def _reseed() -> None:
    """Reseed generators that were seeded at import: forks would draw equal numbers, new processes do not.

    ``random`` reseeds itself after a fork. Torch's CUDA generators do not exist yet.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
