"""Leaves processes of every kind behind, then ends as its first argument says: ``code:N``, ``signal:N``, ``wait``,
or several of these, one for each attempt.

A plain child, one in a session of its own, a daemon forked twice, one that a thread started and that ignores SIGTERM,
one that keeps stdout open, and one with an empty environment.
"""

import os
import signal
import subprocess
import sys
import threading

PAUSE = [sys.executable, "-S", "-E", "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]


def quiet(**options: object) -> int:
    null = subprocess.DEVNULL
    return subprocess.Popen(PAUSE, stdin=null, stdout=null, stderr=null, **options).pid  # type: ignore[call-overload]


def daemon() -> int:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writer, str(os.getpid()).encode())
            os.execv(sys.executable, PAUSE)
        os._exit(0)
    os.wait()
    return int(os.read(reader, 20))


def in_thread() -> int:
    pids: list[int] = []
    thread = threading.Thread(target=lambda: pids.append(quiet()))
    thread.start()
    thread.join()
    return pids[0]


def main() -> None:
    pids = {
        "plain": quiet(),
        "session": quiet(start_new_session=True),
        "daemon": daemon(),
        "thread": in_thread(),
        "holds stdout": subprocess.Popen(PAUSE, start_new_session=True).pid,
    }
    if "bare" in sys.argv[2:]:
        pids["bare"] = quiet(env={}, start_new_session=True)
    for name, pid in pids.items():
        print(f"left {name} (pid: {pid})", flush=True)
    print(f"ready (pid: {os.getpid()})", flush=True)
    ends = sys.argv[1].split(",")
    kind, _, value = ends[min(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), len(ends) - 1)].partition(":")
    if kind == "code":
        sys.exit(int(value))
    if kind == "signal":
        os.kill(os.getpid(), int(value))
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
