"""The boxes in the store of the rendezvous, by which nodes and coordinator exchange records.

A record is a signed JSON text at a numbered key below ``ddplaunch/<token>/``. A box is named for who reads it. That of
the coordinator is ``in/NUMBER``: a node takes the next number from the counter ``in/count``, and then writes. That of a
node is ``to/INDEX/NUMBER``: the coordinator alone writes it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ddplaunch.protocol import wire

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ddplaunch.rendezvous.plain_store import PlainStore
    from ddplaunch.rendezvous.store import Signer

GAP = "gap"
"""Written by the coordinator's node into its box, in place of a record that will never be written."""

_POLL_S = 0.1


def coordinator_count_key(prefix: str) -> str:
    """The counter of the coordinator's box: the highest number that a node has taken."""
    return f"{prefix}/in/count"


def send_to_coordinator(store: TCPStore | PlainStore, signer: Signer, prefix: str, record: object) -> None:
    """Write ``record`` into the coordinator's box."""
    key = f"{prefix}/in/{store.add(coordinator_count_key(prefix), 1)}"
    store.set(key, signer.sign(key, wire.encode(record).decode("ascii")))


class Box:
    """One box, for the thread that reads it; others may read ``awaited``.

    Attributes:
        awaited: number of the record that is read next.
    """

    def __init__(
        self,
        path: str,
        signer: Signer,
        allowed: tuple[type, ...],
        on_rejected: Callable[[], None],
        count_key: str,
    ) -> None:
        """``on_rejected`` is called for each value of a stranger; ``count_key`` is empty for the box of a node."""
        self._path, self._signer, self._allowed = path, signer, allowed
        self._on_rejected, self._count_key = on_rejected, count_key
        self.awaited = 1
        self._taken = 0
        """The numbers up to this one were taken ``_POLL_S`` ago: no node replaces what is written there."""

    def key(self, number: int) -> str:
        """The key of the record with this number."""
        return f"{self._path}/{number}"

    def records(self, store: TCPStore) -> Iterator[Any]:
        """The records in the order of their numbers, each once it is written; by a client that nothing else uses.

        Does not end.

        Raises:
            RuntimeError: the store does not answer any more.
        """
        for self.awaited in itertools.count(1):
            record = self._await_record(store, self.key(self.awaited))
            if record is not None:
                yield record

    def _await_record(self, store: TCPStore, key: str) -> object | None:
        """Wait for a record of an allowed type with a valid signature. None for one that no node will write."""
        seen: bytes | None = None
        while (record := self._verified(key, value := store.get(key))) is None:
            if value not in (seen, GAP.encode()):
                seen = value
                self._on_rejected()
            if self.awaited <= self._taken:
                return None
            taken = store.add(self._count_key, 0) if self._count_key else 0
            time.sleep(_POLL_S)  # Enough for a node that has just taken this number to replace the value.
            self._taken = taken
        return record

    def _verified(self, key: str, value: bytes) -> object | None:
        line = None if value == GAP.encode() else self._signer.verify(key, value)
        with contextlib.suppress(wire.ProtocolError):
            return wire.decode(line, self._allowed) if line else None
        return None
