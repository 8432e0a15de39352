"""Every rank but those that are told otherwise is done at once; ``hang.py 1=loop 2=gil``.

Kinds: busy (Python that never pauses), loop (Python that pauses, and costs no CPU), gil (in C, with the GIL), c (in C,
without it), read (of a pipe), stopped (SIGSTOP), talk (says something ten times a second for SECONDS, as in talk:3).
With ``first`` they happen in the first attempt only.
"""

import ctypes
import os
import signal
import sys
import threading
import time


def busy() -> None:
    while True:
        pass


def loop() -> None:
    while True:
        time.sleep(0.01)


def gil() -> None:
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # A call into a PyDLL keeps the GIL.
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def c() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def read() -> None:
    os.read(os.pipe()[0], 1)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    c()


def talk(seconds: str) -> None:
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        print("goes on", flush=True)
        time.sleep(0.1)


def main() -> None:
    assert "DDPLAUNCH_STACKS_FILE" not in os.environ
    print(f"ready (pid: {os.getpid()})", flush=True)
    if "first" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    kinds = dict(argument.split("=") for argument in sys.argv[1:] if "=" in argument)
    kind, _, value = kinds.get(os.environ["RANK"], kinds.get("*", "")).partition(":")
    if kind:
        globals()[kind](*filter(None, [value]))


if __name__ == "__main__":
    main()
