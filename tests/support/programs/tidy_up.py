"""Rank 1 fails with exit code 4 once rank 0 is ready; rank 0 needs its argument in seconds to tidy up after SIGTERM."""

import os
import signal
import sys
import time


def tidy_up(_signum: int, _frame: object) -> None:
    time.sleep(float(sys.argv[1]))
    print("tidied up", flush=True)
    sys.exit(0)


def main() -> None:
    flag = os.path.join(os.environ["XDG_STATE_HOME"], os.environ["TORCHELASTIC_RUN_ID"])
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, tidy_up)
        open(flag, "w").close()
        while True:
            signal.pause()
    while not os.path.exists(flag):
        time.sleep(0.005)
    sys.exit(4)


if __name__ == "__main__":
    main()
