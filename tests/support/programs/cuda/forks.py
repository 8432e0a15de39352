"""Forks after each of many collectives, as a DataLoader does in each epoch, and waits for the child's end."""

import os

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for _ in range(30):
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        child = os.fork()
        if not child:
            os._exit(0)
        del total
        assert os.waitpid(child, 0)[1] == 0
    print(f"rank {dist.get_rank()}: all children ran", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
