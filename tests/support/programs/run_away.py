"""Enters the cgroup given, then leaves processes behind that are hard to find, and waits.

One with no environment in a session of its own, one forked twice, and one that is a new process all the time. With
``bounded``, not that last one.
"""

import os
import signal
import subprocess
import sys

PAUSE = [sys.executable, "-S", "-E", "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]


def daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, PAUSE, {})
        os._exit(0)
    os.wait()


def run_away() -> None:
    if os.fork() == 0:
        os.setsid()
        while True:
            if os.fork():
                os._exit(0)


def main() -> None:
    with open(f"{sys.argv[1]}/cgroup.procs", "w") as procs:
        procs.write("0")
    subprocess.Popen(PAUSE, env={}, start_new_session=True)
    daemon()
    if "bounded" not in sys.argv:
        run_away()
    print(f"ready (pid: {os.getpid()})", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
