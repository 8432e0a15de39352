"""OncePerKey: a cache whose values are created once, by the first thread that needs them. Any launcher thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


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
