"""Rank 1 prints far too much as soon as FOLDER/go is there, rank 0 fails as soon as FOLDER/fail is.

``chatty.py FOLDER LINES``; FOLDER/printed.1 tells how many seconds the printing took, FOLDER/failed and FOLDER/told.1
when rank 0 failed and when rank 1 was told to stop.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder, lines, rank = Path(sys.argv[1]), int(sys.argv[2]), os.environ["RANK"]


def wait_for(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.01)


def told(*_: object) -> None:
    (folder / f"told.{rank}").write_text(str(time.monotonic()))
    sys.exit(0)


signal.signal(signal.SIGTERM, told)
print(f"ready (pid: {os.getpid()})", flush=True)
wait_for("go")
if rank == "1":
    started_s = time.monotonic()
    for number in range(lines):
        print(f"{number:08d} {'x' * 190}")
    (folder / "printed.1").write_text(str(time.monotonic() - started_s))
wait_for("fail" if rank == "0" else "never")
(folder / "failed").write_text(str(time.monotonic()))
sys.exit(7)
