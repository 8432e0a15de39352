"""A mailbox wakes for every signal, whichever thread the kernel gave it to, and leaves the process as it was."""

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
