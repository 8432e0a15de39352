"""Steps of a job over gloo: ``steps.py STEP_S SLOW_RANK EXTRA_S RUN_S``; prints the number of steps.

A step is a pause and one all_reduce; SLOW_RANK pauses EXTRA_S longer. The job ends after RUN_S seconds.
"""

import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    step_s, slow, extra_s, run_s = (float(argument) for argument in sys.argv[1:])
    dist.init_process_group("gloo")
    pause_s = step_s + extra_s * (dist.get_rank() == slow)
    is_over, end_s, steps = torch.zeros(1), time.monotonic() + run_s, 0
    while not is_over:
        time.sleep(pause_s)
        is_over[0] = time.monotonic() > end_s
        dist.all_reduce(is_over)
        steps += 1
    if dist.get_rank() == 0:
        print("steps", steps, flush=True)


if __name__ == "__main__":
    main()
