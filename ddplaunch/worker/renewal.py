"""Makes a fork as new as a process that has just started: random numbers, streams, what was noted about itself."""

from __future__ import annotations

import io
import sys
import threading


def renew() -> None:
    """What an interpreter settles at its start is settled again: random numbers, streams, the main thread's id."""
    _reseed()
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _opened_anew(fd, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # After a fork CPython notes its new ident, but not its new native id.
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]


def _opened_anew(fd: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """As ``python -u`` opens it; a stream keeps from its opening whether it can seek, and ``fd`` was another file."""
    raw = io.FileIO(fd, "wb" if fd else "rb", closefd=False)
    raw.name = old.name
    binary = raw if fd else io.BufferedReader(raw)
    stream = io.TextIOWrapper(binary, old.encoding, old.errors, "\n", write_through=True)
    stream.mode = old.mode  # type: ignore[misc]
    return stream


def _reseed() -> None:
    """Fresh processes draw different numbers, forks the same: reseed what was seeded at import.

    ``random`` reseeds itself after a fork. Torch's CUDA generators are not made yet.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
