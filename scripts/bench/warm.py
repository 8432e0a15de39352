"""Runs that take over what an earlier run has left (--keep-warm): command to first line, leaks, processes killed.

``BENCH_PRELOAD`` names a heavy package (default: sympy and torch._dynamo). Arguments choose parts: start, ssh, leaks,
kills. ``ssh`` needs root: its hosts are network namespaces with a real sshd each, from ``tests/support/nodes.py``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from common import DDPLAUNCH, PROGRAMS, REPEATS, TORCHRUN, check_hosts, size

from ddplaunch.features.warm import keeper_files

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.nodes import Keys, Lab  # noqa: E402

WORKERS = size("BENCH_WORKERS", 8, 2)
PRELOAD = os.environ.get("BENCH_PRELOAD", "sympy,torch._dynamo")
RUNS = size("BENCH_WARM_RUNS", 200, 1)
KILLS = size("BENCH_WARM_KILLS", 20, 1)
VICTIMS = ("launcher", "agent", "forkserver")[: size("BENCH_WARM_VICTIMS", 3, 1)]
SCRIPT = PROGRAMS / "first_line.py"
WAYS: tuple[tuple[str, ...], ...] = ((), ("--preload", PRELOAD))[: size("BENCH_WARM_WAYS", 2, 1)]
COMPARED = size("BENCH_WARM_COMPARED", 3, 1)
"""So many of: warm, cold, torchrun."""


class State:
    """A state folder, and the keeper of the runs that use it."""

    def __init__(self, folder: str) -> None:
        self.environ = {**os.environ, "XDG_STATE_HOME": folder}
        self.socket = keeper_files.in_base(Path(folder, "ddplaunch"))

    def leave(self, *options: str) -> None:
        """Leave a keeper, and wait until it is ready."""
        first_line((*DDPLAUNCH, "--keep-warm", "1h", *options), self.environ)
        deadline = time.monotonic() + 120
        while not self.socket.exists():
            if time.monotonic() > deadline:
                sys.exit(f"no keeper: {keeper_files.reason(self.socket)}")
            time.sleep(0.05)

    def keeper(self) -> psutil.Process | None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:2] == ["ddplaunch", "keeper"] and str(self.socket.parent.parent) == (
                    process.environ().get("XDG_STATE_HOME")
                ):
                    return process
        return None

    def end(self) -> None:
        if keeper := self.keeper():
            keeper.terminate()
            psutil.wait_procs([keeper], 10)


@contextlib.contextmanager
def kept(*options: str) -> Iterator[State]:
    """A state folder with a keeper."""
    with tempfile.TemporaryDirectory() as folder:
        state = State(folder)
        state.leave(*options)
        yield state
        state.end()


def first_line(command: tuple[str, ...], environ: dict[str, str], hosts: int = 1) -> tuple[float, float]:
    """Seconds from the command to the first line of its workers, and to that of the last worker."""
    started = time.perf_counter()
    with subprocess.Popen(
        (*command, "--nproc-per-node", str(WORKERS // hosts), str(SCRIPT)),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout
        times = []
        for line in process.stdout:  # torchrun's workers may write two into one.
            times += [time.perf_counter() - started] * line.count(b"first line")
    if process.returncode or len(times) != WORKERS:
        sys.exit(f"{' '.join(command)} ended with {process.returncode} after {len(times)} lines")
    return times[0], times[-1]


def start() -> None:
    """Second runs beside our own cold start and torchrun, in turns."""
    for options in WAYS:
        with kept(*options) as state:
            commands = {
                "warm": (*DDPLAUNCH, *options),
                "cold": (*DDPLAUNCH, "--keep-warm", "0", *options),
                "torchrun": (*TORCHRUN, "--standalone"),
            }
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in [*commands][:COMPARED]}
            for _ in range(REPEATS):
                for name, times in taken.items():
                    times.append(first_line(commands[name], state.environ))
        show(f"{WORKERS} workers, {' '.join(options) or 'torch only'}", taken)


def show(title: str, taken: dict[str, list[tuple[float, float]]]) -> None:
    """Medians, and the fastest run."""
    print(f"\n{title}; medians of {REPEATS}, in turns")
    warm = statistics.median(first for first, _ in taken["warm"])
    for name, values in taken.items():
        first, last = (statistics.median(column) for column in zip(*values, strict=True))
        least = min(first for first, _ in values)
        print(f"  {name:9} first line {first:.3f} s ({first / warm:.1f} x warm; least {least:.3f} s),", end=" ")
        print(f"of the last worker {last:.3f} s")


HOSTS = size("BENCH_NODES", 2, 1)


def ssh() -> None:
    """As ``start``, on two hosts over SSH: second runs beside a cold start, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Keys(Path(folder))
        for name in ("client", *(f"node{number + 1}" for number in range(HOSTS))):
            keys.make(name)
        with Lab(Path(folder) / "lab", keys, HOSTS) as lab:
            names = ",".join(node.name for node in lab.nodes)
            hosts = ("--hosts", names, "--ssh-config", str(lab.ssh_config), "-x", "XDG_STATE_HOME")
            environ = {**os.environ, "XDG_STATE_HOME": folder, "OMP_NUM_THREADS": "1"}
            ways = {"warm": (), "cold": ("--keep-warm", "0")}

            def run(way: str, *options: str) -> tuple[float, float]:
                command = (*lab.prefix, *DDPLAUNCH, *hosts, *ways[way], *options)
                return first_line(command, environ, HOSTS)

            run("warm", "--keep-warm", "1h")
            while len(list(Path(folder, "ddplaunch").glob("warm-*.sock"))) < HOSTS:
                time.sleep(0.05)
            taken: dict[str, list[tuple[float, float]]] = {way: [] for way in [*ways][:COMPARED]}
            for _ in range(REPEATS):
                for way, times in taken.items():
                    times.append(run(way))
    show(f"{WORKERS} workers on {HOSTS} hosts over SSH, torch only", taken)


def leaks(state: State) -> None:
    """Descriptors and memory of the keeper after many runs, and processes that are left."""
    first_line(DDPLAUNCH, state.environ)
    keeper = state.keeper()
    assert keeper
    before = state_of(keeper)
    for _ in range(RUNS):
        first_line(DDPLAUNCH, state.environ)
    after = state_of(keeper)
    assert state.keeper() == keeper, "another keeper"
    print(f"\n{RUNS} warm runs; keeper:")
    for name, value in before.items():
        growth = f" ({(after[name] / value - 1) * 100:+.2f} %)" if value else ""
        print(f"  {name:28} {value} -> {after[name]}{growth}")


def state_of(keeper: psutil.Process) -> dict[str, int]:
    """What must not grow. Pages of libraries count less in PSS the more processes of the machine use them."""
    rollup = Path(f"/proc/{keeper.pid}/smaps_rollup").read_text().split()
    memory = {name: int(rollup[rollup.index(f"{name}:") + 1]) for name in ("Pss", "Pss_Anon")}
    return {
        "descriptors": keeper.num_fds(),
        "children": len(keeper.children()),
        "PSS in KiB": memory["Pss"],
        "PSS without libraries in KiB": memory["Pss_Anon"],
    }


def kills(state: State) -> None:
    """SIGKILL at random moments of a warm run: is the run gone, and does the next one work?"""
    took = statistics.median(first_line(DDPLAUNCH, state.environ)[1] for _ in range(min(3, KILLS)))
    for victim in VICTIMS:
        clean = warm = missed = 0
        for number in range(KILLS):
            hit, is_clean = _killed(state, victim, random.uniform(0, took * 1.2), f"{victim}{number}")
            missed += not hit
            clean += is_clean
            first_line(DDPLAUNCH, state.environ)
            warm += state.keeper() is not None
        print(f"{victim} killed: {clean} of {KILLS} clean, the next run worked {KILLS} times,", end=" ")
        print(f"keeper left {warm} ({missed} times it had not begun or had ended)", flush=True)


def _killed(state: State, victim: str, after_s: float, run_id: str) -> tuple[bool, bool]:
    process = subprocess.Popen(
        (*DDPLAUNCH, "--rdzv-id", run_id, "--nproc-per-node", str(WORKERS), str(SCRIPT)),
        env=state.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(after_s)
    pids = [process.pid] if victim == "launcher" else [p for p in _of_run(run_id) if _is(p, victim)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return bool(pids), False
    deadline = time.monotonic() + 10
    while left := _of_run(run_id):
        if time.monotonic() > deadline:
            print(f"left of {run_id}: {left}")
            return bool(pids), False
        time.sleep(0.05)
    return bool(pids), True


def _of_run(run_id: str) -> list[int]:
    """Processes with the run's tag."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if f"\0DDPLAUNCH_RUN_ID={run_id}." in "\0" + Path(f"/proc/{pid}/environ").read_bytes().decode("latin1"):
                found.append(pid)
    return found


def _is(pid: int, kind: str) -> bool:
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"ddplaunch.agent.main" in line if kind == "agent" else line.startswith(f"ddplaunch\0{kind}".encode())
    return False


if __name__ == "__main__":
    check_hosts()
    parts = sys.argv[1:] or ("start", "ssh", "leaks", "kills")
    for part, measure in {"start": start, "ssh": ssh}.items():
        if part in parts:
            measure()
    with kept() if {"leaks", "kills"} & {*parts} else contextlib.nullcontext() as state:
        for part, measure_state in {"leaks": leaks, "kills": kills}.items():
            if part in parts:
                measure_state(state)
