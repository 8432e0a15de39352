"""The agent's ear for its launcher: a thread that reads what it says, and one that notices when it says nothing."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from ddplaunch import protocol
from ddplaunch.agent.events import LauncherGone
from ddplaunch.records import TO_AGENT, Notice, Ping

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from ddplaunch.mailbox import Mailbox


def start(stream: BinaryIO, mailbox: Mailbox[object], tell: Callable[[object], None]) -> threading.Event:
    """Post the launcher's records as they come, and LauncherGone at their end or when the pings stop coming.

    A cut network ends no connection; only a launcher on another machine sends pings. What is no record is complained
    of by ``tell``, and is the end. Returns what is set from LauncherGone on.
    """
    is_gone = threading.Event()
    threading.Thread(target=_listen, args=(stream, mailbox, tell, is_gone), name="launcher", daemon=True).start()
    return is_gone


def _listen(
    stream: BinaryIO, mailbox: Mailbox[object], tell: Callable[[object], None], is_gone: threading.Event
) -> None:
    pings: queue.SimpleQueue[float] | None = None
    try:
        while (received := protocol.read_record(stream, TO_AGENT)) is not None:
            record = received[0]
            if isinstance(record, Ping):
                if pings is None:
                    pings = queue.SimpleQueue()
                    watch = threading.Thread(target=_watch, args=(pings, mailbox, is_gone), name="pings", daemon=True)
                    watch.start()
                pings.put(record.lost_after_s)
            mailbox.post(record)
    except (OSError, protocol.CutOff):
        pass
    except protocol.ProtocolError as error:
        tell(Notice(f"what the launcher says is not understood, and its job ends: {error}", -1))
    is_gone.set()
    mailbox.post(LauncherGone())


def _watch(pings: queue.SimpleQueue[float], mailbox: Mailbox[object], is_gone: threading.Event) -> None:
    lost_after_s = pings.get()
    try:
        while True:
            lost_after_s = pings.get(timeout=lost_after_s)
    except queue.Empty:
        is_gone.set()
        mailbox.post(LauncherGone())
