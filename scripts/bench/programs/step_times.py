"""A gloo job of small all-reduces: ``step_times.py START END``, times of ``time.time()`` between which it counts.

Each rank prints ``steps COUNT WALL_S CPU_S SWITCHES ANSWER_CPU_S``: what its process used for its steps, its context
switches, and the CPU time of the thread that answers ddplaunch's questions.
"""

import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def counters() -> tuple[float, float, int, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    answers = (each.parent for each in Path("/proc/self/task").glob("*/comm") if each.read_text() == "ddplaunch-info\n")
    answer_s = sum(int(thread.joinpath("schedstat").read_text().split()[0]) for thread in answers) / 1e9
    return time.perf_counter(), time.process_time(), usage.ru_nvcsw + usage.ru_nivcsw, answer_s


def main() -> None:
    start, end = map(float, sys.argv[1:])
    dist.init_process_group("gloo")
    tensor = torch.zeros(250)
    while not tensor[0]:
        tensor[0] = time.time() > start
        dist.all_reduce(tensor)
    tensor[0], steps, before = 0, 0, counters()
    while not tensor[0]:
        tensor[0] = time.time() > end
        dist.all_reduce(tensor)
        steps += 1
    used = [new - old for new, old in zip(counters(), before, strict=True)]
    print("steps", steps, *(f"{each:.6f}" for each in used), flush=True)


if __name__ == "__main__":
    main()
