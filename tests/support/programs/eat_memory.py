"""Rank 1 takes memory until it is killed; the others wait."""

import os
import signal


def main() -> None:
    print(f"ready (pid: {os.getpid()})", flush=True)
    kept = []
    while os.environ["RANK"] == "1":
        kept.append(b"x" * (16 << 20))
    signal.pause()


if __name__ == "__main__":
    main()
