"""Gloo jobs of four ranks that hang: ``hangs.py KIND [PATH]``. Each KIND is a function below.

Each rank says ``ready RANK PID``, and does the thing that hangs then. Rank 2 is the cause where no other one is named.
"""

import ctypes
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

PATH = sys.argv[2] if len(sys.argv) > 2 else ""
for_ever = threading.Event().wait


def all_reduce(size: int = 3, group: "dist.ProcessGroup | None" = None) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def all_gather(*, is_async: bool = False) -> "dist.Work | None":
    return dist.all_gather([torch.ones(3) for _ in range(4)], torch.ones(3), async_op=is_async)


def sleep(rank: int) -> None:
    if rank == 2:
        time.sleep(10_000)
    all_reduce()


def stopped(rank: int) -> None:
    """Somebody else sends SIGSTOP to rank 2."""
    while True:
        all_reduce()
        time.sleep(0.02)


def lock(rank: int) -> None:
    if rank == 2:
        mutex = threading.Lock()
        mutex.acquire()
        mutex.acquire()
    all_reduce()


def read(rank: int) -> None:
    """PATH is a FIFO that nobody writes, or a file in a file system that does not answer."""
    if rank == 2:
        with open(PATH, "rb") as file:
            file.read(1)
    all_reduce()


def uninterruptible(rank: int) -> None:
    """A parent of vfork is in state D until the child executes a program: this child waits for the FIFO at PATH."""
    if rank == 2:
        opens = [(os.POSIX_SPAWN_OPEN, 0, PATH, os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=opens)
    all_reduce()


def asks(rank: int) -> None:
    if rank == 0:
        input()
    all_reduce()


def other_operation(rank: int) -> None:
    all_gather() if rank == 2 else all_reduce()


def other_size(rank: int) -> None:
    dist.broadcast(torch.ones(4 if rank == 2 else 3), 2 if rank == 2 else 0)
    all_reduce()


def other_order(rank: int) -> None:
    calls = [lambda: all_gather(is_async=True), lambda: dist.all_reduce(torch.ones(3), async_op=True)]
    for work in [call() for call in (calls if rank == 2 else calls[::-1])]:
        work.wait()


def subgroup(rank: int) -> None:
    """Rank 3 does not join the call of its group."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank == 3:
        for_ever()
    all_reduce(group=pairs[rank // 2])
    all_reduce()


def no_barrier(rank: int) -> None:
    if rank == 2:
        for_ever()
    dist.barrier()


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5 and dist.is_initialized() and dist.get_rank() == 2:
            time.sleep(10_000)
        return index


def loader(rank: int) -> None:
    for _ in torch.utils.data.DataLoader(Samples(), num_workers=1):
        all_reduce()


def send(rank: int) -> None:
    """Rank 0 sends to rank 1, which does not receive."""
    if rank == 0:
        dist.send(torch.ones(1 << 20), 1)
    all_reduce()


def recv(rank: int) -> None:
    """Rank 0 receives from rank 1, which does not send."""
    if rank == 0:
        dist.recv(torch.ones(3), 1)
    all_reduce()


def ended(rank: int) -> None:
    """Rank 2 ends with 0; the others create a group."""
    if rank == 2:
        os._exit(0)
    dist.new_group([0, 1, 2, 3])


def new_group(rank: int) -> None:
    if rank == 2:
        for_ever()
    dist.new_group([0, 1, 2, 3])


def ring(rank: int) -> None:
    """Each rank waits for the next one in another group."""
    groups = [dist.new_group(sorted((first, (first + 1) % 4))) for first in range(4)]
    all_reduce(group=groups[rank])
    all_reduce(group=groups[rank - 1])


def gil(rank: int) -> None:
    if rank == 2:
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # A call into a PyDLL keeps the GIL.
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    all_reduce()


def at_exit(rank: int) -> None:
    """The interpreter of rank 2 waits for a thread at its end."""
    if rank == 2:
        threading.Thread(target=for_ever).start()
        sys.exit(0)
    all_reduce()


def only_rank_0(rank: int) -> None:
    if rank == 0:
        dist.all_gather_object([None] * 4, "loss")
    all_reduce()


def wrong_source(rank: int) -> None:
    dist.broadcast(torch.ones(3), 1 if rank == 2 else 0)
    all_reduce()


def endless(rank: int) -> None:
    while rank == 2:
        pass
    all_reduce()


def prints(rank: int) -> None:
    """Rank 2 says that it lives, again and again."""
    while rank == 2:
        print("still alive")
        time.sleep(0.2)
    all_reduce()


def child(rank: int) -> None:
    """Rank 2 waits for a program that never ends."""
    if rank == 2:
        os.system("exec sleep 10000")
    all_reduce()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(2):
        all_reduce()
    print(f"ready {rank} {os.getpid()}", flush=True)
    globals()[sys.argv[1]](rank)


if __name__ == "__main__":
    main()
