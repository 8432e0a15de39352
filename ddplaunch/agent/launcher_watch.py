"""The agent's ear for its launcher: a thread that reads what it says, and one that notices when it says nothing."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from ddplaunch import protocol
from ddplaunch.agent.events import LauncherGone
from ddplaunch.records import TO_AGENT, Ping

if TYPE_CHECKING:
    from typing import BinaryIO

    from ddplaunch.mailbox import Mailbox


def start(stream: BinaryIO, mailbox: Mailbox[object]) -> None:
    """Post the launcher's records as they come, and LauncherGone at their end or when the pings stop coming.

    A cut network ends no connection; only a launcher on another machine sends pings.
    """
    threading.Thread(target=_listen, args=(stream, mailbox), name="launcher", daemon=True).start()


def _listen(stream: BinaryIO, mailbox: Mailbox[object]) -> None:
    pings: queue.SimpleQueue[float] | None = None
    try:
        while (received := protocol.read_record(stream, TO_AGENT)) is not None:
            record = received[0]
            if isinstance(record, Ping):
                if pings is None:
                    pings = queue.SimpleQueue()
                    threading.Thread(target=_watch, args=(pings, mailbox), name="pings", daemon=True).start()
                pings.put(record.lost_after_s)
            mailbox.post(record)
    except (OSError, protocol.ProtocolError):
        pass
    mailbox.post(LauncherGone())


def _watch(pings: queue.SimpleQueue[float], mailbox: Mailbox[object]) -> None:
    lost_after_s = pings.get()
    try:
        while True:
            lost_after_s = pings.get(timeout=lost_after_s)
    except queue.Empty:
        mailbox.post(LauncherGone())
