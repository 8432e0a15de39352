"""Steps of about 1 ms, only in some of the slots of time: ``step_slots.py START SLOTS SLOT_S MINE``.

``MINE`` has a character for each slot of a period: this job steps where it is 1, and sleeps elsewhere. Rank 0 prints
the microseconds of a step in each slot. Two jobs with opposite slots share the machine and never run at the same time.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

SETTLE_S = 0.02


def main() -> None:
    start, slots, slot_s, mine = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    matrix = torch.rand(160, 160)
    for slot in range(slots):
        begin = start + slot * slot_s
        time.sleep(max(0.0, begin + SETTLE_S - time.time()))
        if mine[slot % len(mine)] == "1":
            found = steps(matrix, begin + slot_s - SETTLE_S)
            if dist.get_rank() == 0:
                print(f"slot {slot} {found:.2f}", flush=True)
    dist.destroy_process_group()


def steps(matrix: torch.Tensor, end: float) -> float:
    """Steps until ``end``, as rank 0 sees it. Returns the microseconds of one."""
    count, begun, is_over = 0, time.perf_counter(), torch.zeros(1)
    while not is_over:
        matrix @ matrix
        is_over.fill_(float(dist.get_rank() == 0 and time.time() >= end))
        dist.all_reduce(is_over)
        count += 1
    return 1e6 * (time.perf_counter() - begun) / count


if __name__ == "__main__":
    main()
