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


def test_events_of_one_kind_are_taken_before_the_others_which_stay_in_order() -> None:
    mailbox: Mailbox[object] = Mailbox()
    for event in (1, "a", 2, 3, "b"):
        mailbox.post(event)
    assert mailbox.take(int) == [1, 2, 3]
    assert mailbox.take(int) == []
    assert [mailbox.get(0.0), mailbox.get(0.0), mailbox.get(0.0)] == ["a", "b", None]


def test_a_deadline_ends_the_wait() -> None:
    mailbox: Mailbox[str] = Mailbox()
    started = time.monotonic()
    assert mailbox.get(started - 1) is None
    assert mailbox.get(started + 0.1) is None
    assert started + 0.1 <= time.monotonic() < started + 30


def test_a_deadline_that_is_over_in_microseconds_ends_the_wait_too() -> None:
    """``SimpleQueue.get`` alone, until Python 3.12, waits for ever in one of some thousand such calls."""
    mailbox: Mailbox[str] = Mailbox()
    ends: list[str | None] = []

    def take_often() -> None:
        for count in range(20_000):
            mailbox.post("event")
            mailbox.get()
            ends.append(mailbox.get(time.monotonic() + count % 40 * 0.25e-6))

    thread = threading.Thread(target=take_often, daemon=True)
    thread.start()
    thread.join(30)
    assert ends == [None] * 20_000


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
