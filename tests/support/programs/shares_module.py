"""Rank 0 changes a module that was imported before the fork, the other ranks then look at it.

``shares_module.py FOLDER``. In attempt 0 rank 0 fails.
"""

import os
import sys
import time
from pathlib import Path

import counted

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
changed = folder / f"changed-{attempt}"
print(f"imported by {counted.IMPORTED_BY}, changed {counted.changes} times (pid: {os.getpid()})", flush=True)
if rank == 0:
    counted.changes += 1
    sys.modules["json.decoder"] = None
    os.environ["HOME"] = "/changed"
    changed.touch()
    while not (folder / f"seen-{attempt}").exists():
        time.sleep(0.01)
    sys.exit(1 if attempt == 0 else 0)
while not changed.exists():
    time.sleep(0.01)
import json.decoder  # noqa: E402

by_import = f"{os.environ['SET_BY_IMPORT']}, {os.environ['CHANGED_BY_IMPORT']}"
home = os.environ["HOME"] != "/changed"
print(f"afterwards {counted.changes}, {json.decoder.__name__}, {home}, {by_import}", flush=True)
(folder / f"seen-{attempt}").touch()
if attempt == 0:
    time.sleep(60)
