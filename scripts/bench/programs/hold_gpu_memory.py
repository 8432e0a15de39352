"""A worker that finds out whether GPU memory is free, takes it, and dies: the driver frees it later.

``hold_gpu_memory.py STATE``: the file that the fake driver reads; what was found is appended to ``STATE.found``.
"""

import os
import sys
from pathlib import Path

state = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    is_free = "0 used 0\n" in state.read_text()
    with state.with_suffix(".found").open("a") as found:
        found.write(f"{int(is_free)}\n")
    new = state.with_suffix(".taken")
    new.write_text(state.read_text().replace("0 used 0\n", f"0 used {40 << 30}\n"))
    new.replace(state)
    sys.exit(7)
