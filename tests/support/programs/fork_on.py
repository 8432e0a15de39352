"""Ends well, and leaves a process that for 20 s again and again forks itself and exits, in a session of its own.

It holds the FIFO its argument names open for writing, so that the FIFO's end tells its end.
"""

import os
import sys
import time


def run_on() -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if os.fork():
            os._exit(0)
        os.setsid()


def main() -> None:
    os.set_inheritable(os.open(sys.argv[1], os.O_WRONLY), True)
    if os.fork() == 0:
        run_on()
    os.wait()
    print(f"ready (pid: {os.getpid()})", flush=True)


if __name__ == "__main__":
    main()
