"""Daemon threads: each call that blocks has one of its own.

Used in every process but the script's. An exception that ``work`` does not catch is a bug: Python prints its traceback
(``threading.excepthook``), and who waits for the result gets ``otherwise``, so that nobody waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK_S = 0.05
"""Seconds between two looks of a thread that waits for another one."""


def in_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """Call ``work`` in a new thread.

    Raises:
        RuntimeError: no room for a thread.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def post_from_thread(name: str, work: Callable[[], T], on_result: Callable[[T], object], otherwise: T) -> None:
    """Call ``work`` in a new thread, and there ``on_result`` with what it returns; with ``otherwise`` if it fails.

    ``on_result`` mostly posts the result for the main thread. Without room for a thread, this one calls it with
    ``otherwise``.
    """

    def run() -> None:
        result = otherwise
        try:
            result = work()
        finally:
            on_result(result)

    try:
        in_thread(name, run)
    except RuntimeError:
        on_result(otherwise)


def start_work(name: str, work: Callable[[], T], otherwise: T) -> Callable[[float], T]:
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


def result_of(name: str, work: Callable[[], T], is_given_up: Callable[[], bool], otherwise: T) -> T:
    """What ``work`` returns, or raises, in a new thread; ``otherwise`` as soon as ``is_given_up()``: it then goes on.

    ``is_given_up`` is called every ``LOOK_S`` while this thread waits, and may do something else meanwhile. Where there
    is no room for a thread, this one calls ``work``.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    is_over = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            is_over.set()

    try:
        in_thread(name, run)
    except RuntimeError:
        run()
    while not is_over.wait(LOOK_S):
        if is_given_up():
            return otherwise
    if errors:
        raise errors[0]
    return results[0]
