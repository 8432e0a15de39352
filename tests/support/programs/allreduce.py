"""All-reduces over gloo for ``STEPS`` steps; in each of the first attempts one rank may die in the middle.

``allreduce.py STEPS [RANK:SIGNAL,...]``: one for each attempt.
"""

import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    steps = int(sys.argv[1])
    deaths = sys.argv[2].split(",") if len(sys.argv) > 2 else []
    print(f"ready (pid: {os.getpid()}) port {os.environ['MASTER_PORT']}", flush=True)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    victim, _, signum = (deaths[attempt] if attempt < len(deaths) else "-1:0").partition(":")
    for step in range(steps):
        if rank == int(victim) and step == steps // 2:
            os.kill(os.getpid(), int(signum))
        value = torch.ones(4) * (rank + 1)
        dist.all_reduce(value)
        assert value[0] == sum(range(1, dist.get_world_size() + 1)), value
    print(f"sum {int(value[0])} in attempt {attempt}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
