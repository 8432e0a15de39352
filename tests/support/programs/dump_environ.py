"""Writes its environment, its arguments and where MASTER_PORT is listened at to FOLDER/RANK.json.

``dump_environ.py FOLDER [ARGUMENT...]``; with the argument ``wait`` it then waits to be stopped.
"""

import json
import os
import signal
import sys
from pathlib import Path


def listeners(port: int) -> list[str]:
    """Local addresses, as the kernel's tables have them, of all sockets that listen at ``port``."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    local = [row[1].rpartition(":") for row in rows if row[3] == "0A"]
    return [address for address, _, hexadecimal in local if int(hexadecimal, 16) == port]


def dump(folder: Path) -> None:
    seen = {
        "environ": dict(os.environ),
        "argv": sys.argv[1:],
        "listeners": listeners(int(os.environ["MASTER_PORT"])),
        "cpus": len(os.sched_getaffinity(0)),
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    dump(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--local-rank"))))
    print(f"ready (pid: {os.getpid()})", flush=True)
    if "wait" in sys.argv:
        signal.pause()
