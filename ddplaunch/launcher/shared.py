"""Values that many threads want and one of them makes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


class Shared(Generic[T]):
    """Makes the value for each key once: the first caller makes it, the others wait for it or for its exception.

    A value that is not good any more is made anew by the next caller.
    """

    def __init__(self, is_good: Callable[[T], bool] = lambda _: True) -> None:
        self._is_good = is_good
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value for ``key``; ``make`` must not ask for the same key."""
        with self._lock:
            future = self._futures.get(key)
            is_ours = future is None or self._is_stale(future)
            if is_ours:
                future = self._futures[key] = Future()
        assert future is not None
        if is_ours:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _is_stale(self, future: Future[T]) -> bool:
        return future.done() and not future.exception() and not self._is_good(future.result())
