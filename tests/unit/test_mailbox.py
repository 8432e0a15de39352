"""Events come in order, from any thread, until the deadline."""

from __future__ import annotations

import threading
import time

from ddplaunch.mailbox import Mailbox


def test_events_come_in_the_order_they_were_posted() -> None:
    mailbox: Mailbox[str] = Mailbox()
    for text in "abc":
        mailbox.post(text)
    assert [mailbox.get(0.0), mailbox.get(), mailbox.get(time.monotonic() + 60)] == ["a", "b", "c"]


def test_a_deadline_ends_the_wait() -> None:
    mailbox: Mailbox[str] = Mailbox()
    started = time.monotonic()
    assert mailbox.get(started - 1) is None
    assert mailbox.get(started + 0.1) is None
    assert started + 0.1 <= time.monotonic() < started + 30


def test_an_event_of_another_thread_ends_the_wait() -> None:
    mailbox: Mailbox[str] = Mailbox()
    threading.Timer(0.05, mailbox.post, ["event"]).start()
    assert mailbox.get(time.monotonic() + 60) == "event"


def test_it_can_be_read_in_another_thread() -> None:
    mailbox: Mailbox[str] = Mailbox()
    taken: list[str | None] = []
    thread = threading.Thread(target=lambda: taken.extend(mailbox.get(time.monotonic() + 60) for _ in range(2)))
    thread.start()
    mailbox.post("a")
    mailbox.post("b")
    thread.join(60)
    assert taken == ["a", "b"]
