"""A rank with two DataLoader workers of its own; SIGKILLs itself when they run."""

import os
import signal

from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> int:
        if index < 64:
            print(f"left loader (pid: {os.getpid()})", flush=True)
        return index * index


def main() -> None:
    loader = iter(DataLoader(Squares(), batch_size=64, num_workers=2, persistent_workers=True))
    next(loader)
    print(f"ready (pid: {os.getpid()})", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
