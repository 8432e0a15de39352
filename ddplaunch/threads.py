"""Daemon threads: each call that blocks has one of its own.

Used in every process but the script's. An exception that ``work`` does not catch is a bug: Python prints its traceback
(``threading.excepthook``), and whoever waits for an answer gets the other one, so that nobody waits for ever.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def in_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """Call ``work`` in a new thread.

    Raises:
        RuntimeError: no room for a thread.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def post_from_thread(name: str, work: Callable[[], T], post: Callable[[T], object], otherwise: T) -> None:
    """Call ``work`` in a new thread, which posts what it returns; ``otherwise`` if it fails.

    Where there is no room for a thread, this one posts ``otherwise``.
    """

    def run() -> None:
        result = otherwise
        try:
            result = work()
        finally:
            post(result)

    try:
        in_thread(name, run)
    except RuntimeError:
        post(otherwise)


def begin(name: str, work: Callable[[], T], otherwise: T) -> Callable[[float], T]:
    """Call ``work`` in a new thread. The function that is returned waits for the result until a deadline.

    After the deadline (``time.monotonic()``), or if ``work`` fails, or without room for a thread, it is ``otherwise``.
    """
    results: list[T] = []
    is_over = threading.Event()

    def end(result: T) -> None:
        results.append(result)
        is_over.set()

    def result(deadline: float) -> T:
        is_over.wait(max(0.0, deadline - time.monotonic()))
        return results[0] if results else otherwise

    post_from_thread(name, work, end, otherwise)
    return result
