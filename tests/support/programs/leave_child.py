"""Rank 0 leaves a child in its process group and ends well; the others wait until they are stopped."""

import os
import signal


def main() -> None:
    if os.environ["RANK"] == "0":
        pid = os.fork()
        if pid:
            print(f"left child (pid: {pid})", flush=True)
            return
    signal.pause()


if __name__ == "__main__":
    main()
