"""What the coordinator tells the nodes, on its way through the store: a box for each, numbered from 1."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddplaunch import protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import TCPStore

    from ddplaunch.rendezvous.coordinator import Sent


class Outboxes:
    """Of all nodes; only the coordinator's process writes to them."""

    def __init__(self, store: TCPStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._counts: Counter[int] = Counter()

    def send(self, messages: Sequence[Sent]) -> None:
        """All in one go: one by one, the last of thousands of nodes would hear of a stop much later than the first."""
        texts: dict[str, str] = {}
        record, text = None, ""
        for message in messages:
            if message.record is not record:
                record, text = message.record, protocol.encode(message.record).decode("ascii")
            self._counts[message.node_index] += 1
            texts[f"{self._prefix}/to/{message.node_index}/{self._counts[message.node_index]}"] = text
        if texts:
            self._store.multi_set(list(texts), list(texts.values()))  # type: ignore[attr-defined]
