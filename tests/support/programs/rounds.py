"""All-reduces over gloo until the file ``END`` is there: ``rounds.py END``. With the stub of torch, ranks only meet."""

import os
import sys
import time

import torch
import torch.distributed as dist


def is_over() -> bool:
    return os.path.exists(sys.argv[1])


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_stub = torch.__version__ == "stub"
    if is_stub and size > 1:  # Of a single worker nobody serves the store.
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store.add("here", 1)
        while store.add("here", 0) < size:
            time.sleep(0.01)
    elif not is_stub:
        dist.init_process_group("gloo")
        assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    logs = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
    number = int(logs.split("attempt_")[1].split("/")[0])
    print(f"rank {rank} of {size} in round {number}", flush=True)
    if is_stub:
        while not is_over():
            time.sleep(0.01)
        return
    while True:
        all_over = torch.tensor([float(is_over())])
        dist.all_reduce(all_over)
        if all_over:
            break
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
