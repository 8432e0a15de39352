"""Makes a bad error file of the kind its argument names, one for each attempt, then fails with exit code 3."""

import glob
import os
import sys
import time

path = os.environ["TORCHELASTIC_ERROR_FILE"]
print(f"ready (pid: {os.getpid()})", flush=True)


def write(data: bytes) -> None:
    with open(f"{path}.new", "wb") as file:
        file.write(data)
    os.rename(f"{path}.new", path)


def huge() -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 30)


def large() -> None:
    """3 MiB, from all ranks: none ends before all have written."""
    write(b'{"message": {"message": "large", "extraInfo": {"py_callstack": "%s"}}}' % (b"y" * (3 << 20)))
    while len(glob.glob(os.path.join(os.path.dirname(path), "../*/error.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


KINDS = {
    "missing": lambda: None,
    "empty": lambda: write(b""),
    "truncated": lambda: write(b'{"message": {"message": "Value'),
    "huge": huge,
    "not JSON": lambda: write(b"segmentation fault\n"),
    "not an object": lambda: write(b"[1, 2]"),
    "another schema": lambda: write(b'{"message": {"extraInfo": [], "message": {"a": ["\\ud800", null]}}}'),
    "large": large,
    "deep": lambda: write(b"[" * 100_000),
    "invalid UTF-8": lambda: write(b'{"message": "\xff\xfe"}'),
    "control characters": lambda: write(b'{"message": "\\u001b[2J\\u0007wiped\\u009b"}'),
    "unreadable": lambda: (write(b'{"message": "secret"}'), os.chmod(path, 0)),
    "symlink": lambda: os.symlink("/etc/passwd", path),
    "FIFO": lambda: os.mkfifo(path),
    "directory": lambda: os.mkdir(path),
}
kinds = sys.argv[1].split(",")
KINDS[kinds[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]]()
sys.exit(3)
