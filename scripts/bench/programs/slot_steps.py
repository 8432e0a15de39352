"""A gloo job that computes and makes an all-reduce in each step, in its own slots of wall time.

``slot_steps.py INDEX START END PERIOD``: job INDEX of three; times of ``time.time()``; the slots have PERIOD seconds.
Each rank prints ``slot NUMBER STEPS WALL_S CPU_S SWITCHES`` for each of its slots: what its process has used in it.
"""

import resource
import sys
import time

import torch
import torch.distributed as dist

ORDER = (0, 1, 2, 2, 1, 0)
"""Which job runs in which slot: what gets faster or slower with time affects all alike."""

MARGIN_S = 0.1


def counters() -> tuple[float, float, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), time.process_time(), usage.ru_nvcsw + usage.ru_nivcsw


def slot(end: float) -> str:
    """Step until ``end``; all ranks make equally many steps."""
    flag, steps, before = torch.zeros(250), 0, counters()
    while not flag[0]:
        sum(range(10_000))
        flag[0] = dist.get_rank() == 0 and time.time() > end
        dist.all_reduce(flag)
        steps += 1
    used = (new - old for new, old in zip(counters(), before, strict=True))
    return f"{steps} " + " ".join(f"{each:.6f}" for each in used)


def main() -> None:
    index, start, end, period = int(sys.argv[1]), *map(float, sys.argv[2:])
    dist.init_process_group("gloo")
    lines = []
    for number in range(int((end - start) / period)):
        begins = start + number * period
        if ORDER[number % len(ORDER)] == index:
            time.sleep(max(0.0, begins - time.time()))
            dist.barrier()
            lines.append(f"slot {number} {slot(begins + period - MARGIN_S)}")
    time.sleep(max(0.0, end - time.time()))  # Printed at the end: output is a reason to wake the agent.
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
