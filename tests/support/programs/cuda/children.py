"""Starts a process by each method of multiprocessing, and says how many GPUs it sees."""

import os

import torch
import torch.multiprocessing as mp


def count(queue):
    on_gpu = torch.ones(1).cuda(1)
    queue.put(torch.cuda.device_count() if on_gpu.is_cuda else 0)


def peek(queue):
    queue.put(torch.cuda.device_count())  # More a fork may not do, if its parent has used a GPU.


def main():
    print(f"ready (pid: {os.getpid()})", flush=True)
    for method in ("fork", "spawn", "forkserver"):
        context = mp.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=peek if method == "fork" else count, args=(queue,))
        process.start()
        print(f"{method}: {queue.get()} GPUs", flush=True)
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    main()
