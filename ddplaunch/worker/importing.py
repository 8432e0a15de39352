"""Imports on behalf of processes that are forked later."""

from __future__ import annotations

import contextlib
import gc
import importlib
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def error_of(module: str) -> str:
    """Import it; the last lines of the traceback if that fails."""
    try:
        importlib.import_module(module)
    except BaseException:
        return traceback.format_exc(limit=-3)
    return ""


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """What is made in the block is not collected, now or in a fork, whose pages that would unshare.

    The collector would look at all that is imported again and again, a tenth of the time for torch, and find nothing.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        if not gc.get_threshold()[0]:  # Else a module wants others.
            gc.set_threshold(*thresholds)
