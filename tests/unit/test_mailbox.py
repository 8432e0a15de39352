"""Events come in order, from any thread, until the deadline; and a mailbox wakes for every signal."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ddplaunch.agent import main
from ddplaunch.mailbox import Mailbox
from ddplaunch.system.signals import SENT_TO_RUNS, SignalReceived, post_signals
from tests.support.processes import wait_until


def test_events_of_one_kind_are_taken_before_the_others_which_stay_in_order() -> None:
    mailbox: Mailbox[object] = Mailbox()
    for event in (1, "a", 2, 3, "b"):
        mailbox.post(event)
    for found in ([1, 2, 3], []):
        assert mailbox.take(lambda event: isinstance(event, int)) == found
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
    thread.join(100)
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


# Signals, whichever thread the kernel gives them to. The process stays as it was.


@pytest.fixture
def mailbox() -> Iterator[Mailbox[str]]:
    """Gets an event for each SIGUSR1."""
    mailbox: Mailbox[str] = Mailbox()
    before = signal.signal(signal.SIGUSR1, lambda *_: mailbox.post("signal"))
    yield mailbox
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_to_the_main_thread_ends_the_wait(mailbox: Mailbox[str]) -> None:
    threading.Timer(0.05, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1]).start()
    assert mailbox.get(time.monotonic() + 60) == "signal"


def test_a_signal_that_the_kernel_gives_to_another_thread_ends_the_wait_too(mailbox: Mailbox[str]) -> None:
    def get_signalled() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    for _ in range(20):
        threading.Timer(0.02, get_signalled).start()
        assert mailbox.get(time.monotonic() + 20) == "signal"
        assert mailbox.get(0.0) is None


def test_whoever_watched_signals_before_watches_them_again(mailbox: Mailbox[str]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        mailbox.get(0.0)
        signal.raise_signal(signal.SIGUSR1)
        assert os.read(reader, 1) == bytes([signal.SIGUSR1])
    finally:
        assert signal.set_wakeup_fd(before) == writer
        os.close(reader)
        os.close(writer)
    assert mailbox.get(0.0) == "signal"


def test_nothing_is_left_of_a_mailbox_that_is_gone() -> None:
    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = left()
    for _ in range(5):
        Mailbox[str]().get(0.0)
    gc.collect()
    wait_until(lambda: left() <= before)


@pytest.mark.usefixtures("no_threads")
def test_without_room_for_a_thread_it_works_as_well_as_it_can() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.post("a")
    assert mailbox.get(0.0) == "a"


def test_once_the_exit_code_is_known_only_keys_end_the_process() -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGCHLD)}
    try:
        with post_signals([number.name for number in numbers], print, ends_process=True):
            pass
        after = [signal.getsignal(number) for number in numbers]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert after == [signal.SIG_IGN, signal.SIG_IGN, before[signal.SIGINT], before[signal.SIGQUIT]]


def test_an_agent_hears_once_of_a_moment_s_stops_but_of_each_signal_that_it_passes_on() -> None:
    """The second SIGTERM that SLURM sends would end the transfer of logs that the first one has begun."""
    mailbox: Mailbox[object] = Mailbox()
    before = {number: signal.getsignal(number) for number in (*SENT_TO_RUNS, signal.SIGCHLD)}
    main._post_signals(mailbox)
    try:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    heard = [event.signum for event in iter(lambda: mailbox.get(0.0), None) if isinstance(event, SignalReceived)]
    assert heard == [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]


def test_a_handler_that_a_c_library_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    getsignal = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR2 else getsignal(number))
    with post_signals(("SIGUSR1", "SIGUSR2"), print):
        assert getsignal(signal.SIGUSR1) != signal.SIG_DFL
        assert getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert getsignal(signal.SIGUSR1) == signal.SIG_DFL
