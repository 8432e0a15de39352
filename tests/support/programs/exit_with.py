"""Ends as its argument for this rank says; a rank without one waits until it is stopped.

``exit_with.py 1=code:7 0=signal:9``, ``*=`` for all others. Kinds: code:N, signal:N, raise:TEXT, text:TEXT, segfault,
throw:TEXT for an exception of C++ that nobody catches, when-told:N for signal N at SIGTERM, linger:FILE for an
exception whose atexit function creates FILE and waits; ``+FILE+`` before one waits for that file. Ends separated by
commas are for one attempt each.
"""

import atexit
import ctypes
import os
import signal
import sys
import time


def main() -> None:
    print(f"ready (pid: {os.getpid()})", flush=True)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    most = os.environ["TORCHELASTIC_MAX_RESTARTS"]
    print(f"attempt {attempt} of {most}, port {os.environ['MASTER_PORT']}", flush=True)
    ends = dict(argument.split("=", 1) for argument in sys.argv[1:])
    end = ends.get(os.environ["RANK"], ends.get("*", ""))
    if "," in end:
        end = end.split(",")[int(attempt)]
    if end.startswith("+"):
        path, _, end = end[1:].partition("+")
        while not os.path.exists(path):
            time.sleep(0.001)
    kind, _, value = end.partition(":")
    if kind == "code":
        sys.exit(int(value))
    elif kind == "signal":
        if int(value) != signal.SIGKILL:
            signal.signal(int(value), signal.SIG_DFL)
        os.kill(os.getpid(), int(value))
    elif kind == "when-told":
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), int(value)))
        print("waits to be told", flush=True)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "raise":
        raise RuntimeError(value)
    elif kind == "throw":
        said = f"terminate called after throwing an instance of 'gloo::IoException'\n  what():  {value}"
        print(said, file=sys.stderr, flush=True)
        os.abort()
    elif kind == "linger":
        atexit.register(signal.pause)
        atexit.register(open, value, "w")
        raise RuntimeError("lingers")
    elif kind == "text":
        sys.exit(value)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
