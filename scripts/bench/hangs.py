"""Proves the detection of hangs: jobs that hang, and jobs that are healthy and silent.

``hangs.py hangs [KIND...]``: is each hang reported, with the right ranks and the right state, and how long after the
limit? ``hangs.py silences [KIND...]``: is any healthy job ended or called stuck? ``--repeats N`` repeats each row.
``BENCH_JOBS`` run at once, 3 by default; ``SILENCE_S`` is the length of a silence, 12 s by default; over 300 s the
default limit is tested: ``SILENCE_S=400 BENCH_JOBS=6 hangs.py silences evaluate debug --options default``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pty
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from common import DDPLAUNCH, IS_SMALLEST, size
from common import PROGRAMS as OWN_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROGRAMS = Path(__file__).resolve().parents[2] / "tests" / "support" / "programs"
AT_ONCE = size("BENCH_JOBS", 3, 1)
LIMIT_S = size("BENCH_LIMIT_S", 4.0, 2.0)
GIVE_UP_S = 90.0
NODES = {"1 x 4": ("--nproc-per-node", "4"), "2 x 2": ("--dry-run", "--nnodes", "2", "--nproc-per-node", "2")}
ONE, TWO = NODES
ALARM = re.compile("job seems to hang|the job hangs")
NEVER = "(?!)"


@dataclass(frozen=True)
class Hang:
    """One hang, and what must be found.

    Attributes:
        ranks: that are the cause; several sets where more than one answer is right.
        text: that a sentence of the report must contain.
        needs: a key of ``PREPARED``: what the program reads.
    """

    kind: str
    ranks: tuple[set[int], ...]
    text: str
    state: str = "stuck"
    nodes: str = ONE
    needs: str = ""
    title: str = ""


HANGS = (
    Hang("sleep", ({2},), "rank 2 never joined all_reduce"),
    Hang("sleep", ({2},), "never joined all_reduce", nodes=TWO, title="sleep, two nodes"),
    Hang("stopped", ({2},), "suspended by a signal"),
    Hang("stopped", ({2},), "suspended by a signal", nodes=TWO, title="stopped, two nodes"),
    Hang("lock", ({2},), "rank 2 never joined all_reduce"),
    Hang("read", ({2},), "rank 2 never joined all_reduce", needs="fifo", title="read of a FIFO"),
    Hang("read", ({2},), "uninterruptible sleep", needs="dead_fs", title="read of a dead file system (FUSE)"),
    Hang("uninterruptible", ({2},), "uninterruptible sleep", needs="fifo", title="state D (vfork), with the GIL"),
    Hang("asks", ({0},), "waiting for input", needs="terminal", title="input from a terminal"),
    Hang("asks", ({0},), "waiting for input", needs="pipe", title="input from a pipe"),
    Hang("other_operation", ({2},), "rank 2 called all_gather"),
    Hang("other_size", ({2},), "rank 2 called"),
    Hang("other_order", ({2},), "same calls in another order"),
    Hang("subgroup", ({3},), "rank 3 never joined all_reduce"),
    Hang("no_barrier", ({2},), "rank 2 never joined barrier"),
    Hang("loader", ({2},), "rank 2 never joined all_reduce"),
    Hang("send", ({0}, {0, 1}, {1}), "sends to rank 1, which does not receive"),
    Hang("recv", ({0}, {0, 1}, {1}), "receives from rank 1, which does not send"),
    Hang("ended", ({2},), "rank 2 has ended"),
    Hang("new_group", ({2},), "rank 2 never joined new_group"),
    Hang("ring", ({0, 1, 2, 3},), "ranks 0-3 wait for each other"),
    Hang("gil", ({2},), "in gil"),
    Hang("at_exit", ({2},), "rank 2 never joined all_reduce"),
    Hang("only_rank_0", ({0},), "rank 0 called all_gather"),
    Hang("wrong_source", ({2}, {0, 2}), "broadcast #3"),
    Hang("endless", ({2},), "rank 2 never joined all_reduce", state="busy"),
    Hang("endless", ({2},), "never joined all_reduce", state="busy", nodes=TWO, title="endless, two nodes"),
    Hang("child", ({2},), "rank 2 never joined all_reduce"),
)


# What a program reads, and nobody writes.


@contextlib.contextmanager
def fifo(folder: Path) -> Iterator[tuple[str, int]]:
    os.mkfifo(folder / "fifo")
    yield str(folder / "fifo"), subprocess.DEVNULL


@contextlib.contextmanager
def dead_fs(folder: Path) -> Iterator[tuple[str, int]]:
    """A file system whose server lives and never answers reads; needs root."""
    mount_point = folder / "dead"
    mount_point.mkdir()
    server = subprocess.Popen((sys.executable, str(OWN_PROGRAMS / "dead_fs.py"), str(mount_point)))
    while not mount_point.is_mount():
        if server.poll() is not None:
            raise RuntimeError("no FUSE here")
        time.sleep(0.05)
    try:
        yield str(mount_point / "file"), subprocess.DEVNULL
    finally:
        server.kill()
        server.wait()
        ctypes.CDLL(None).umount2(os.fsencode(mount_point), 2)


@contextlib.contextmanager
def first_of(fds: tuple[int, int]) -> Iterator[tuple[str, int]]:
    yield "", fds[0]
    for fd in fds:
        os.close(fd)


def terminal(_folder: Path) -> contextlib.AbstractContextManager[tuple[str, int]]:
    master, slave = pty.openpty()
    return first_of((slave, master))


def pipe(_folder: Path) -> contextlib.AbstractContextManager[tuple[str, int]]:
    return first_of(os.pipe())


@contextlib.contextmanager
def nothing(_folder: Path) -> Iterator[tuple[str, int]]:
    yield "", subprocess.DEVNULL


PREPARED = {"": nothing, "fifo": fifo, "dead_fs": dead_fs, "terminal": terminal, "pipe": pipe}


# Jobs.


@dataclass
class Job:
    """A run, with the time at which each line came."""

    process: subprocess.Popen[bytes]
    lines: list[tuple[float, str]]

    def wait_for(self, pattern: str, count: int = 1, seconds: float = GIVE_UP_S) -> list[tuple[float, str]]:
        """Lines that match ``pattern``, once there are ``count`` of them; fewer if the run ends or time is up."""
        end, stream = time.monotonic() + seconds, self.process.stdout
        assert stream
        while True:
            found = [line for line in self.lines if re.search(pattern, line[1])]
            if len(found) >= count or not select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
                return found
            line = stream.readline()
            if not line:  # The run has ended.
                return found
            self.lines.append((time.monotonic(), line.decode("utf-8", "replace").rstrip()))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def job(arguments: Sequence[str], stdin: int) -> Iterator[Job]:
    process = subprocess.Popen(
        (*DDPLAUNCH, "--shutdown-timeout", "1", *arguments),
        bufsize=0,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield Job(process, [])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Measured:
    title: str
    is_right: bool
    late_s: float | None
    text: str


def hang(each: Hang) -> Measured:
    with tempfile.TemporaryDirectory() as name, PREPARED[each.needs](Path(name)) as (path, stdin):
        arguments = (*NODES[each.nodes], "--hang-report", f"{LIMIT_S:.0f}", "--log-dir", f"{name}/logs")
        with job((*arguments, str(PROGRAMS / "hangs.py"), each.kind, *filter(None, [path])), stdin) as running:
            ready = running.wait_for(r"ready \d", 4)
            began = max((at for at, _ in ready), default=0.0)
            if each.kind == "stopped":
                pids = {text.split()[-2]: int(text.split()[-1]) for _, text in ready}
                os.kill(pids["2"], signal.SIGSTOP)
                began = time.monotonic()
            reports = running.wait_for("seems to hang|some ranks compute")
            if not reports:
                return Measured(each.title or each.kind, False, None, shown(running))
            running.wait_for("rank", len(running.lines) + 5, 1.0)
            found = json.loads(next(Path(name, "logs").rglob("hang.json")).read_text())
            return judged(each, found, reports[0][0] - began - LIMIT_S)


def shown(running: Job) -> str:
    return " / ".join(text for _, text in running.lines[-8:])


def judged(each: Hang, found: dict[str, object], late_s: float) -> Measured:
    sentences = "; ".join(found["sentences"])  # type: ignore[arg-type]
    is_right = set(found["culprits"]) in each.ranks and found["job_state"] == each.state  # type: ignore[arg-type]
    text = f"{found['job_state']}, ranks {found['culprits']}: {sentences}"
    return Measured(each.title or each.kind, is_right and each.text in sentences, late_s, text)


# Healthy silences.

SILENCE_S = size("SILENCE_S", 12.0, 0.1)
OPTIONS = {"default": (), "4 s": ("--hang-timeout", f"{LIMIT_S:.0f}", "--hang-report", f"{LIMIT_S:.0f}")}
SILENCES = (
    *("evaluate", "evaluate_a_little", "evaluate_in_thread", "multiply", "save", "save_slowly", "save_mapped"),
    *("load_mapped", "save_compressed", "save_in_thread", "copy_files", "list_files", "database", "compile_model"),
    *("compile_files", "tokenize", "download", "download_slowly", "download_to_file", "download_by_program"),
    *("debug", "evaluate_alike", "step_silently", "step_slowly", "pause", "pipeline"),
    *("progress_bar", "log_to_file", "preprocess", "suspended", "download_trickle"),
)
INTENDED = "sleep_by_intent"
"""Nothing moves: with a silence longer than the limit a report is right. Only on request."""


@dataclass(frozen=True)
class Silence:
    """One healthy job."""

    kind: str
    nodes: str
    options: str

    @property
    def title(self) -> str:
        return f"{self.kind}, {self.nodes}, {self.options}"


def silence(each: Silence) -> Measured:
    """Right if the job ends with 0 and was never called stuck; one report that ranks compute is no error."""
    keys, stdin = keyboard(each)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (*NODES[each.nodes], *OPTIONS[each.options], "--log-dir", folder)
        with job((*arguments, str(OWN_PROGRAMS / "silences.py"), each.kind), stdin) as running:
            running.wait_for("ready", 4)
            act(each, running, keys)
            running.wait_for(NEVER, seconds=SILENCE_S + GIVE_UP_S)
            code = running.process.wait(60)
    for descriptor in filter(lambda each: each >= 0, {keys, stdin}):
        os.close(descriptor)
    reports = [text for _, text in running.lines if ALARM.search(text)]
    busy = sum("some ranks compute" in text for _, text in running.lines)
    is_right = code == 0 and len(reports) == (each.kind == INTENDED) and busy <= 1
    return Measured(each.title, is_right, None, "reported as busy" if is_right and busy else wrong(running, is_right))


def wrong(running: Job, is_right: bool) -> str:
    return "" if is_right else " / ".join(text for _, text in running.lines[-14:])


def keyboard(each: Silence) -> tuple[int, int]:
    """Where to type, and what the job reads: a terminal on one node, a pipe on several."""
    if not each.kind.startswith("debug"):
        return -1, subprocess.DEVNULL
    if each.nodes == ONE:
        return pty.openpty()
    reading, writing = os.pipe()
    return writing, reading


def act(each: Silence, running: Job, keys: int) -> None:
    """What a person does meanwhile."""
    if keys >= 0:
        running.wait_for(NEVER, seconds=SILENCE_S)
        os.write(keys, b"continue\n")
    if each.kind == "suspended":
        launcher = psutil.Process(running.process.pid)
        tree = [launcher, *launcher.children(recursive=True)]
        for process in tree:
            process.suspend()
        time.sleep(SILENCE_S)
        for process in reversed(tree):
            process.resume()


# The tables.


def guarded(measure: Callable[[Any], Measured]) -> Callable[[Any], Measured]:
    def run(each: Any) -> Measured:
        try:
            return measure(each)
        except Exception as error:
            return Measured(each.title or each.kind, False, None, repr(error))

    return run


def print_rows(measure: Callable[[Any], Measured], rows: Sequence[Any]) -> None:
    measured = []
    print("| job | right | after the limit | found |\n|---|---|---|---|")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for each in pool.map(guarded(measure), rows):
            measured.append(each)
            late = "-" if each.late_s is None else f"{each.late_s:.1f} s"
            print(f"| {each.title} | {'yes' if each.is_right else 'NO'} | {late} | {each.text} |", flush=True)
    late_s = [each.late_s for each in measured if each.late_s is not None]
    times = (
        f"; after the limit: median {statistics.median(late_s):.1f} s, at most {max(late_s):.1f} s" if late_s else ""
    )
    print(f"\n{sum(each.is_right for each in measured)} of {len(measured)} right{times}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", choices=("hangs", "silences"), nargs="?", default="hangs")
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--nodes", choices=("", *NODES), default="")
    parser.add_argument("--options", choices=("", *OPTIONS), default="")
    chosen = parser.parse_args()
    measure, rows = {
        "hangs": (hang, HANGS),
        "silences": (
            silence,
            tuple(
                Silence(kind, nodes, options)
                for kind in (*SILENCES, INTENDED)
                for nodes in NODES
                for options in OPTIONS
            ),
        ),
    }[chosen.table]
    kinds = chosen.kinds or ["lock"] if IS_SMALLEST else chosen.kinds or {each.kind for each in rows} - {INTENDED}
    print_rows(measure, [each for each in rows if each.kind in kinds and is_chosen(each, chosen)] * chosen.repeats)


def is_chosen(each: Any, chosen: argparse.Namespace) -> bool:
    options = getattr(each, "options", "")
    return chosen.nodes in ("", each.nodes) and chosen.options in ("", options)


if __name__ == "__main__":
    main()
