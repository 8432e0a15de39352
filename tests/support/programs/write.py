"""Does what its arguments say, in order, and exits with 0.

``out:TEXT`` and ``err:TEXT`` write the text at once, with Python's escapes and a byte per character (``\\xff``);
``big:N`` writes a line of N bytes to stdout, ``lines:N`` N short ones; ``ask:`` reads a line of stdin and writes it;
``tty:`` prints which of stdin, stdout and stderr are terminals; ``until:PATH`` waits for that file. ``1/out:TEXT`` is
for rank 1 alone.
"""

import os
import sys
import time


def write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def do(what: str, text: str) -> None:
    if what in ("out", "err"):
        write(1 if what == "out" else 2, text.encode("latin-1").decode("unicode_escape").encode("latin-1"))
    elif what == "big":
        write(1, (os.environ["RANK"] * (int(text) - 1) + "\n").encode())
    elif what == "lines":
        for _ in range(int(text)):
            print("line")
    elif what == "ask":
        print(f"got {sys.stdin.readline()!r}", flush=True)
    elif what == "tty":
        print(f"terminals: {[os.isatty(fd) for fd in range(3)]}", flush=True)
    elif what == "until":
        while not os.path.exists(text):
            time.sleep(0.02)
    else:
        sys.exit(f"cannot {what}")


for argument in sys.argv[1:]:
    what, _, text = argument.partition(":")
    rank, _, what = what.rpartition("/")
    if rank in ("", os.environ["RANK"]):
        do(what, text)
