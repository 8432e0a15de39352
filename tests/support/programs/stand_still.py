"""Ends once one of its ranks has stood still for long: ``stand_still.py FILE SECONDS``. That rank makes FILE."""

import os
import sys
import time
from pathlib import Path


def main() -> None:
    path, limit_s = Path(sys.argv[1]), float(sys.argv[2])
    last_s = time.monotonic()
    print(f"ready (pid: {os.getpid()})", flush=True)
    while not path.exists():
        time.sleep(0.005)
        if time.monotonic() - last_s > limit_s:
            print("stood still", flush=True)
            path.touch()
        last_s = time.monotonic()


if __name__ == "__main__":
    main()
