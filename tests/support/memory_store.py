"""A store in this process with the calls of a TCPStore that the rendezvous makes: what ``get`` misses it waits for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta


class MemoryStore:
    """One client; ``clone`` makes another of the same store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._timeout_s = 10.0

    def clone(self) -> MemoryStore:
        other = MemoryStore()
        other.values, other._changed = self.values, self._changed
        return other

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        with self._changed:
            self.values.update(zip(keys, values, strict=True))
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, min(self._timeout_s, threading.TIMEOUT_MAX)):
                raise RuntimeError(f"wait timeout after {self._timeout_s * 1000:g}ms, keys: /{key}")
            return self.values[key].encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            number = int(self.values.get(key, "0")) + amount
            self.values[key] = str(number)
            return number

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._changed:
            if self.values.get(key, "") == expected:
                self.values[key] = desired
            return self.values[key].encode()

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self.values for key in keys)
