"""Rank 1 takes memory until it is killed; the others wait."""

import os
import signal
from pathlib import Path


def main() -> None:
    print(f"ready (pid: {os.getpid()})", flush=True)
    kept = []
    if os.environ["RANK"] == "1":
        # The kernel takes the largest, and where torch is a build for CUDA the store may be that.
        Path("/proc/self/oom_score_adj").write_text("1000")
    while os.environ["RANK"] == "1":
        kept.append(b"x" * (16 << 20))
    signal.pause()


if __name__ == "__main__":
    main()
