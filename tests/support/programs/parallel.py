"""Starts processes in all the ways a training script does, and prints one line for each way that worked."""

import multiprocessing
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass


@dataclass
class Point:
    """Of ``__main__``, so that other processes must find this module to load one."""

    x: int
    y: int


def swap(point: Point) -> Point:
    return Point(point.y, point.x)


class Squares:
    """A dataset; DataLoader needs nothing but these two methods."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


def put(queue: multiprocessing.SimpleQueue) -> None:
    queue.put((multiprocessing.current_process().name, multiprocessing.parent_process() is not None))


def pools(method: str) -> None:
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map(swap, [Point(1, 2), Point(3, 4)]) == [Point(2, 1), Point(4, 3)]
    queue = context.SimpleQueue()
    process = context.Process(target=put, args=(queue,), name="named")
    process.start()
    assert queue.get() == ("named", True)
    process.join()
    assert process.exitcode == 0
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        assert list(executor.map(swap, [Point(1, 2)])) == [Point(2, 1)]
    print(f"multiprocessing {method}", flush=True)


def loads_data(method: str) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
    assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25, 36, 49]]
    print(f"DataLoader {method}", flush=True)


def others() -> None:
    assert pickle.loads(pickle.dumps(Point(1, 2))) == Point(1, 2)
    done = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, check=True)
    assert done.stdout == b"42\n"
    thread = threading.Thread(target=subprocess.run, args=(["true"],))
    thread.start()
    thread.join()
    print("subprocess", flush=True)


if __name__ == "__main__":
    for way in sys.argv[1:]:
        kind, _, start = way.partition(":")
        if kind == "pools":
            pools(start)
        elif kind == "data":
            loads_data(start)
        else:
            others()
