"""Of many hosts that get the code, which get it from the launcher, and which from a host that has it.

Runs in the process of the command. Pure: sends nothing, and times are given, as of ``time.monotonic()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.features.snapshot.queries import Source

_PLACES, _ONE_MORE_S = 2, 5.0
"""So many hosts are served by the launcher at first, and one more each time: a slow host holds up no other one."""

_MAX_TAKERS = 4
"""Of one source."""

_SMALL_BYTES = 256 << 10
"""What is less comes from the launcher at once."""

_MAX_FAILURES = 8
"""After so many without any success, hosts cannot reach each other."""


class Spread:
    """Who is served by whom; hosts by name. Main thread.

    Attributes:
        waiting: those that wait for a place or a source.
    """

    def __init__(self, *, is_on: bool) -> None:
        """If it is not ``is_on``, the launcher serves all hosts at once."""
        self.waiting: dict[str, None] = {}
        self._is_on, self._begun_at = is_on, 0.0
        self._served: set[str] = set()
        self._taking: dict[str, str] = {}
        self._sources: dict[str, Source] = {}
        self._want_little: set[str] = set()
        self._alone: set[str] = set()
        """Their source has failed: the launcher serves them."""
        self._failures: Counter[str] = Counter()

    def wants(self, name: str, nbytes: int, now: float) -> None:
        """A host wants so many bytes; if it has got its source from ``placed``, that has failed."""
        self._begun_at = self._begun_at or now
        if name in self._want_little:  # It had no place.
            self._served.discard(name)
        if failed := self._taking.pop(name, ""):
            self._failures[failed] += 1
            if self._failures[failed] > 1:
                self._sources.pop(failed, None)
            self._is_on = self._failures.total() < _MAX_FAILURES
            self._alone.add(name)
        (self._want_little.add if nbytes < _SMALL_BYTES else self._want_little.discard)(name)
        self.waiting[name] = None

    def has_copy(self, name: str) -> bool:
        """A host has its copy. Returns whether it is to be a source; it then keeps its place until ``gives``."""
        if self._taking.pop(name, ""):
            self._failures.clear()
        if not (is_source := self._is_on and bool(self.waiting)):
            self._served.discard(name)
        return is_source

    def gives(self, name: str, source: Source | None) -> None:
        """A host is a source, or cannot be one."""
        self._served.discard(name)
        if source:
            self._sources[name] = source

    def leaves(self, name: str) -> None:
        """A host has failed: it neither gets nor gives anything."""
        self.waiting.pop(name, None)
        self._sources.pop(name, None)
        self._taking.pop(name, None)
        self._served.discard(name)

    def placed(self, now: float) -> Iterator[tuple[str, Source | None]]:
        """The hosts that need not wait any longer, each with its source; None: the launcher."""
        for name in tuple(self.waiting):
            is_at_once = not self._is_on or name in self._alone or name in self._want_little
            source = None if is_at_once else self._free_source()
            if source:
                self._served.discard(name)
                self._taking[name] = source
            elif is_at_once or name in self._served or self._has_place(now):
                self._served.add(name)
            else:
                continue
            del self.waiting[name]
            yield name, self._sources[source] if source else None

    def _free_source(self) -> str | None:
        takers = Counter(self._taking.values())
        free = [name for name in self._sources if takers[name] < _MAX_TAKERS]
        return min(free, key=lambda name: takers[name], default=None)

    def _has_place(self, now: float) -> bool:
        places = _PLACES + (now - self._begun_at) // _ONE_MORE_S
        return len(self._served - self._alone - self._want_little) < places
