"""Prints each signal it gets; SIGTERM, SIGINT, SIGQUIT and SIGHUP end it well, its argument in seconds later."""

import os
import signal
import sys
import time

LINGER_S = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def main() -> None:
    seen: list[int] = []
    for signum in (*ENDS, signal.SIGUSR1, signal.SIGUSR2):
        # One that is ignored (nohup) stays ignored.
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, _frame: seen.append(number))
    print(f"ready (pid: {os.getpid()})", flush=True)
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        time.sleep(0.005)
        while seen:
            number = seen.pop(0)
            print(f"got {signal.Signals(number).name}", flush=True)
            if number in ENDS and deadline is None:
                deadline = time.monotonic() + LINGER_S
    print("bye", flush=True)


if __name__ == "__main__":
    main()
