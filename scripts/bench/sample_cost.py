"""What usage samples cost: CPU of the agent and the launcher, the time of a step, bytes on disk.

``sample_cost.py [disk] [one] [cpu] [steps]``, all by default. ``BENCH_S``: seconds of each measurement, 60 by default.

Jobs that run side by side differ by some percent. For the time of a step two jobs take turns: one steps while the other
sleeps and its agent is suspended, in the order ABBA, and slots next to each other are compared. A slot is 1 s and has a
sample: twice as many as usual. As a control, both jobs are without samples.
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from common import DDPLAUNCH, PROGRAMS, size

from ddplaunch.agent.workers.worker import Worker
from ddplaunch.features.usage.records import PERIOD_S, UsageSample
from ddplaunch.features.usage.usage_files import NodeFile, row, thinned
from ddplaunch.features.usage.usage_recorder import DiskUse, UsageSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

SECONDS = size("BENCH_S", 60.0, 0.2)
WORKERS, RANKS, NODES = size("BENCH_WORKERS", 8, 1), size("BENCH_RANKS", 2, 1), 64
SLOT_S, START_S = size("BENCH_SLOT_S", 1.0, 0.2), size("BENCH_START_S", 25.0, 10.0)
DAY_S = size("BENCH_DAY_S", 86_400, 600)
OFF = ("--no-samples",)
TALK = f"while true; do echo line; sleep {min(1.0, SECONDS)}; done"


# CPU.


def cpu_ns(process: psutil.Process) -> int:
    """CPU time of all threads, by the scheduler's clock."""
    texts = (task.read_text() for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
    return sum(int(text.split()[0]) for text in texts)


def cpu_shares(options: Sequence[str]) -> tuple[float, float]:
    """Percent of a core that the agent and the launcher use, while 8 workers write a line a second."""
    command = [*DDPLAUNCH, "--nproc-per-node", str(WORKERS), *options, "--no-python", "sh", "-c", TALK]
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert job.stdout
    for _ in range(4 * WORKERS):
        job.stdout.readline()
    drain = ThreadPoolExecutor(1).submit(job.stdout.read)
    launcher = psutil.Process(job.pid)
    (agent,) = launcher.children()
    before, begun = (cpu_ns(agent), cpu_ns(launcher)), time.monotonic()
    time.sleep(SECONDS)
    used, took_s = (cpu_ns(agent) - before[0], cpu_ns(launcher) - before[1]), time.monotonic() - begun
    launcher.terminate()
    job.wait()
    drain.result()
    return used[0] / took_s / 1e7, used[1] / took_s / 1e7


def cpu() -> None:
    rows: list[list[tuple[float, float]]] = [[], []]
    turns = ((), rows[0]), (OFF, rows[1]), (OFF, rows[1]), ((), rows[0])
    for options, found in turns[: size("BENCH_TURNS", 4, 2)]:
        found.append(cpu_shares(options))
    for name, which in (("agent", 0), ("launcher", 1)):
        on, off = (statistics.fmean(each[which] for each in found) for found in rows)
        print(
            f"CPU of the {name}: {on:.4f} % of a core with samples, {off:.4f} % without: {on - off:.4f} %", flush=True
        )


def one() -> None:
    """What the sampling alone takes, without records and wake-ups: the least of many, for load makes it longer."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(WORKERS)]
    workers = [Worker(rank, rank, None, pid=each.pid) for rank, each in enumerate(processes)]
    sampler = UsageSampler(workers, None, DiskUse(None))
    taken = []
    for _ in range(size("BENCH_ROUNDS", 200, 1)):
        begun = time.process_time()
        sampler.with_children([sampler.sample(time.monotonic()) for _ in range(5)])
        taken.append((time.process_time() - begun) / 5)
    for process in processes:
        process.kill()
    share = 100 * min(taken) / PERIOD_S
    print(f"one sample of {WORKERS} workers: {1e6 * min(taken):.0f} us of CPU, {share:.4f} % of a core", flush=True)


# The time of a step.


def job(options: Sequence[str], start: float, slots: int, mine: str) -> dict[int, float]:
    """The microseconds of a step in each slot."""
    words = ("--nproc-per-node", str(RANKS), *options, PROGRAMS / "step_slots.py", start, slots, SLOT_S, mine)
    command = [*DDPLAUNCH, *map(str, words)]
    done = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = ThreadPoolExecutor(1).submit(done.communicate)
    let_agent_run(psutil.Process(done.pid), start, slots, mine)
    output = lines.result()[0]
    found = {int(slot): float(value) for slot, value in re.findall(r"slot (\d+) ([\d.]+)", output)}
    if done.returncode or not found:
        sys.exit(output)
    return found


def let_agent_run(launcher: psutil.Process, start: float, slots: int, mine: str) -> None:
    """Suspend the agent in the slots of the other job, so that its samples fall into its own."""
    time.sleep(max(0.0, start - time.time()))
    (agent,) = launcher.children()
    for slot in range(slots):
        time.sleep(max(0.0, start + slot * SLOT_S - time.time()))
        agent.resume() if mine[slot % len(mine)] == "1" else agent.suspend()
    agent.resume()


def ratios(first: Sequence[str], second: Sequence[str]) -> tuple[list[float], float]:
    """Of each pair of slots next to each other, the first job's time of a step by the second's; and its median."""
    start, slots = time.time() + START_S, 4 * max(1, round(SECONDS / SLOT_S / 2))
    with ThreadPoolExecutor() as pool:
        one = pool.submit(job, first, start, slots, "1001")
        other = pool.submit(job, second, start, slots, "0110")
        found = one.result(), other.result()
    pairs = [(slot, slot + 1) if slot in found[0] else (slot + 1, slot) for slot in range(0, slots, 2)]
    return [found[0][a] / found[1][b] for a, b in pairs], statistics.median(found[0].values())


def interval(values: Sequence[float]) -> str:
    """The median, with its 95 % interval from resampling: a load that comes and goes leaves outliers."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(5000))
    return f"{statistics.median(values):.4f} ({medians[125]:.4f} to {medians[-125]:.4f}), {len(values)} pairs of slots"


def steps() -> None:
    pairs = (("with samples / without", ()), ("control: without / without", OFF))
    for name, first in pairs[: size("BENCH_PAIRS", 2, 1)]:
        found, step_us = ratios(first, OFF)
        print(f"time of a step ({step_us:.0f} us), {name}: {interval(found)}", flush=True)


# Bytes on disk.


def made_up(at_s: float, span_s: float, chance: random.Random) -> UsageSample:
    """A sample of 8 workers and 8 GPUs."""
    node = {"n.cpu": 100, "n.mem": 2e12, "n.disk": 100, "n.rx": 1e9, "n.tx": 1e9}
    workers = {"w.cpu": 800, "w.rss": 1e11, "w.rd": 1e9, "w.wr": 1e8, "w.quiet": 100, "w.lines": 10}
    gpus = {"g.util": 100, "g.mem": 8e10, "g.power": 700, "g.temp": 90}

    def some(most: float, rows: int = WORKERS) -> tuple[float, ...]:
        return tuple(chance.uniform(0, most) for _ in range(rows))

    values = {name: some(most, 1) for name, most in node.items()}
    values |= {name: some(most) for name, most in (workers | gpus).items()}
    return UsageSample(at_s=at_s, span_s=span_s, values=values, throttle=(None,) * WORKERS)


def largest(span_s: int) -> int:
    """Bytes of the file of one node in the last hour of a day, at most."""
    chance, file, most = random.Random(1), NodeFile("node_0.jsonl"), 0
    for at in range(span_s, DAY_S + 1, span_s):
        file.rows.append(row(0, 1.8e9 + at, made_up(at, float(span_s), chance)))
        if at % 120 == 0:
            most = max(most, len(file.text())) if at > DAY_S - 3600 else 0
            file.rows = thinned(file.rows, 1.8e9 + at)
    return most


def disk() -> None:
    for name, span_s in (("a launcher on each node (2 s)", 2), ("over SSH or srun (10 s)", 10)):
        size = largest(span_s)
        print(f"{NODES} nodes of 8 ranks and 8 GPUs after 24 h, {name}: {NODES * size / 1e6:.1f} MB", flush=True)


def main() -> None:
    for measure in sys.argv[1:] or ("disk", "one", "cpu", "steps"):
        {"one": one, "cpu": cpu, "steps": steps, "disk": disk}[measure]()


if __name__ == "__main__":
    main()
