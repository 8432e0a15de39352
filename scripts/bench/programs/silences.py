"""Healthy gloo jobs that print nothing for a while: ``silences.py KIND``; ``SILENCE_S`` seconds, 12 by default.

The kinds in ``ON_RANK_0`` run there, while the other ranks wait in a barrier; those in ``ON_ALL`` run on all ranks.
"""

import contextlib
import gzip
import http.server
import math
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

SILENCE_S = float(os.environ.get("SILENCE_S", "12"))
END = time.monotonic()
COMPUTE = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: sum(range(10000))"


def left_s() -> float:
    return END - time.monotonic()


def compute(seconds: float, share: float = 1.0) -> None:
    """Use a part of a core."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.process_time()
        sum(range(20_000))
        time.sleep((time.process_time() - began) * (1 / share - 1))


def steps(each: Callable[[], object]) -> None:
    while left_s() > 0:
        each()


def run(code: str, **options: object) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, **options)


# On rank 0.


def evaluate() -> None:
    compute(SILENCE_S)


def evaluate_a_little() -> None:
    """A GPU computes; the CPU has 3 % to do."""
    compute(SILENCE_S, 0.03)


def evaluate_in_thread() -> None:
    thread = threading.Thread(target=compute, args=(SILENCE_S, 0.5))
    thread.start()
    thread.join()


def multiply() -> None:
    matrix = torch.ones(200, 200)
    steps(lambda: matrix @ matrix)


def save() -> None:
    """A checkpoint of a few GB to a file system that takes 8 MB/s."""
    with tempfile.TemporaryFile() as file:
        steps(lambda: (file.seek(0), file.write(bytes(4 << 20)), os.fsync(file.fileno()), time.sleep(0.5)))


def save_slowly() -> None:
    """25 kB/s."""
    with tempfile.TemporaryFile() as file:
        steps(lambda: (file.write(bytes(25_000)), file.flush(), time.sleep(1)))


def save_mapped() -> None:
    """Without write(2)."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(64 << 20)
        tensor = torch.from_file(file.name, shared=True, size=16 << 20)
        parts = iter(tensor.split(1 << 16) * 8)
        steps(lambda: (next(parts).fill_(1.0), time.sleep(0.1)))


def load_mapped() -> None:
    """From the disk, without read(2)."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(64 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        parts = iter(torch.from_file(file.name, shared=False, size=16 << 20).split(1 << 16) * 8)
        steps(lambda: (next(parts).sum(), time.sleep(0.1)))


def save_compressed() -> None:
    with tempfile.TemporaryFile() as file, gzip.GzipFile(fileobj=file, mode="wb") as out:
        steps(lambda: (out.write(os.urandom(1 << 16)), time.sleep(0.05)))


def save_in_thread() -> None:
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()


def copy_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "data")
        source.write_bytes(bytes(1 << 20))
        steps(lambda: (shutil.copy(source, Path(folder, "copy")), time.sleep(0.2)))


def list_files() -> None:
    """Metadata only: stat and readdir, as when a data set is indexed."""
    steps(lambda: (sum(len(files) for _, _, files in os.walk("/usr/share")), time.sleep(0.5)))


def database() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(sqlite3.connect(f"{folder}/data")) as connection:
        connection.execute("create table data (number)")
        steps(lambda: (connection.execute("insert into data values (1)"), connection.commit(), time.sleep(0.1)))


def compile_model() -> None:
    """As torch.compile does it: a pool of processes."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(compute, [SILENCE_S / 2, SILENCE_S / 2])


def compile_files() -> None:
    """Short programs, one after another."""
    steps(lambda: run(COMPUTE.format(0.2)))


def tokenize() -> None:
    """A program that computes, for which the worker waits."""
    run(COMPUTE.format(SILENCE_S))


def download_by_program() -> None:
    """Of a program's output only its progress is read."""
    with serving(50_000) as url:
        run(f"import urllib.request; urllib.request.urlopen('{url}').read()")


@contextlib.contextmanager
def serving(bytes_per_s: int) -> Iterator[str]:
    """A local server, in a process of its own outside of the job, that sends slowly for ``SILENCE_S``."""
    address = multiprocessing.get_context("fork").Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            end = time.monotonic() + SILENCE_S
            while time.monotonic() < end:
                self.wfile.write(bytes(bytes_per_s // 4))
                time.sleep(0.25)

        def log_message(self, *_: object) -> None:
            pass

    def serve() -> None:
        os.setsid()
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            address.put(server.server_port)
            server.serve_forever()

    pid = os.fork()
    if not pid:
        if os.fork():  # An orphan is no descendant of the worker: its work is not the worker's.
            os._exit(0)
        signal.alarm(math.ceil(SILENCE_S) + 60)
        serve()
    os.waitpid(pid, 0)
    yield f"http://127.0.0.1:{address.get(timeout=60)}/"


def download() -> None:
    with serving(100_000) as url:
        urllib.request.urlopen(url).read()


def download_slowly() -> None:
    with serving(25_000) as url:
        urllib.request.urlopen(url).read()


def download_trickle() -> None:
    """4 kB/s."""
    with serving(4000) as url:
        urllib.request.urlopen(url).read()


def download_to_file() -> None:
    with serving(200_000) as url, tempfile.NamedTemporaryFile() as file:
        urllib.request.urlretrieve(url, file.name)


def debug() -> None:
    """Somebody else types ``continue`` after the silence."""
    breakpoint()


# On all ranks.


def evaluate_alike() -> None:
    """No rank waits for another one."""
    compute(SILENCE_S, 0.2)


def step_silently() -> None:
    for _ in range(math.ceil(SILENCE_S / 0.05)):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.05)


def step_slowly() -> None:
    for _ in range(5):
        compute(SILENCE_S / 6, 0.05)
        dist.all_reduce(torch.ones(8))


def pause() -> None:
    """Pauses just below the limit."""
    for seconds in (2.5, 0.1, 2.5, 1, 2.5):
        time.sleep(seconds)
        dist.all_reduce(torch.ones(8))


def pipeline() -> None:
    """Send and recv, of which gloo keeps no record."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(math.ceil(SILENCE_S)):
        if rank:
            dist.recv(torch.ones(8), rank - 1)
        compute(0.2, 0.3)
        if rank < world - 1:
            dist.send(torch.ones(8), rank + 1)
        time.sleep(0.3)


def progress_bar() -> None:
    """Without any end of line."""
    steps(lambda: (print("\r 12%", end="", file=sys.stderr, flush=True), time.sleep(1)))


def log_to_file() -> None:
    with tempfile.TemporaryFile("w") as file:
        steps(lambda: (print("loss", "1 " * 8000, file=file, flush=True), time.sleep(0.5)))


def sleep_by_intent() -> None:
    """Nothing moves at all."""
    time.sleep(SILENCE_S)


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        compute(SILENCE_S / 2, 0.3)
        return index


def preprocess() -> None:
    for _ in torch.utils.data.DataLoader(Samples(), num_workers=1):
        dist.all_reduce(torch.ones(1))


def suspended() -> None:
    """Somebody else suspends the whole run and lets it go on."""
    compute(SILENCE_S, 0.1)


ON_RANK_0 = (
    *(evaluate, evaluate_a_little, evaluate_in_thread, multiply, save, save_slowly, save_mapped, load_mapped),
    *(save_compressed, save_in_thread, copy_files, list_files, database, compile_model, compile_files, tokenize),
    *(download, download_slowly, download_trickle, download_to_file, download_by_program, debug),
)
ON_ALL = (evaluate_alike, step_silently, step_slowly, pause, pipeline, progress_bar, log_to_file, preprocess)


def main() -> None:
    global END
    dist.init_process_group("gloo")
    dist.barrier()
    silence = next(each for each in (*ON_RANK_0, *ON_ALL, suspended, sleep_by_intent) if each.__name__ == sys.argv[1])
    print(f"ready {dist.get_rank()}", flush=True)
    END = time.monotonic() + SILENCE_S
    if silence not in ON_RANK_0 or dist.get_rank() == 0:
        silence()
    dist.barrier()


if __name__ == "__main__":
    main()
