"""Ignores every signal that asks to end, as does a child of it; with the argument ``stop`` it SIGSTOPs itself too."""

import os
import signal
import sys

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def main() -> None:
    for signum in STOPS:
        signal.signal(signum, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        os.write(1, f"child (pid: {os.getpid()})\n".encode())
    else:
        os.write(1, f"ready (pid: {os.getpid()})\n".encode())
        if "stop" in sys.argv[1:]:
            os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
