"""Daemon threads: each call that blocks has one of its own. Values that several threads share are made once.

Used in every process but the script's. An exception that ``work`` does not catch is a bug: Python prints its traceback
(``threading.excepthook``), and whoever waits for an answer gets the other one, so that nobody waits for ever.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from concurrent.futures import Future

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


class OncePerKey(Generic[T]):
    """One value per key: the first caller creates it, the others wait for the value or the exception.

    Example::

        transport = jumps.get("gpu1", lambda: connect("gpu1"))
    """

    def __init__(self, is_good: Callable[[T], bool] = lambda _: True) -> None:
        """A value for which ``is_good`` is false is replaced by the next caller; an exception is kept."""
        self._is_good = is_good
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, create: Callable[[], T]) -> T:
        """The value for ``key``; ``create`` must not request the same key, which would deadlock."""
        from concurrent.futures import Future  # Loads logging.

        with self._lock:
            future = self._futures.get(key)
            is_creator = future is None or self._is_stale(future)
            if is_creator:
                future = self._futures[key] = Future()
        assert future is not None
        if is_creator:
            try:
                future.set_result(create())
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _is_stale(self, future: Future[T]) -> bool:
        return future.done() and not future.exception() and not self._is_good(future.result())
