"""What the watch for hangs and slow ranks costs a job of four ranks.

``hang_cost.py [SECONDS]``, 270 by default, for a table in 6 minutes: three equal jobs, one with the watch and two with
``--hang-report off``, take turns in slots of a second. One of the two is compared with the other: the control, whose
deviation from 1 is noise. What the watch uses is also counted directly: the CPU time of launcher and agent beyond that
of a job without the watch, and that of the thread of each worker that answers.
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from common import DDPLAUNCH, PROGRAMS, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HANGS = Path(__file__).resolve().parents[2] / "tests" / "support" / "programs" / "hangs.py"
WATCH: tuple[str, ...] = ()
OFF = ("--hang-report", "off")
RANKS, SLOTS = size("BENCH_RANKS", 4, 3), 6
SECONDS, PERIOD_S = size("BENCH_S", 270.0, 2.8), size("BENCH_PERIOD_S", 1.0, 0.2)
START_S, IDLE_S, SETTLE_S = (
    size("BENCH_START_S", 20.0, 10.0),
    size("BENCH_IDLE_S", 30.0, 0.5),
    size("BENCH_SETTLE_S", 5.0, 0.1),
)
LOOK_S = 0.25
COLUMNS = ("steps", "wall_s", "cpu_s", "switches")


@dataclass
class Job:
    """A job, and what was found of it; seconds and sums of all ranks.

    Attributes:
        slots: number of a slot -> the values of ``COLUMNS``.
        own_s: CPU time of launcher and agent in the whole time.
        answers_s: CPU time of the threads that answer.
        longest_s: most CPU time of one such thread within ``LOOK_S``: a step waits at most so long for one sample.
    """

    process: subprocess.Popen[str]
    slots: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * len(COLUMNS)))
    own_s: float = 0.0
    answers_s: float = 0.0
    longest_s: float = 0.0


def begin(options: Sequence[str], program: Path, *arguments: object) -> subprocess.Popen[str]:
    own = ("--nproc-per-node", str(RANKS), "--log-dir", "/dev/null", "--quiet", *options)
    words = [*DDPLAUNCH, *own, str(program), *map(str, arguments)]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def answering(processes: Sequence[psutil.Process]) -> list[Path]:
    """Counters of the threads that answer the watch."""
    tasks = (task for process in processes for task in Path(f"/proc/{process.pid}/task").glob("*"))
    return [task / "schedstat" for task in tasks if (task / "comm").read_text() == "ddplaunch-info\n"]


def used_ns(counter: Path) -> int:
    return int(counter.read_text().split()[0])


def follow(job: Job, start: float, end: float) -> None:
    """Count from outside what the parts of ddplaunch use between these times."""
    time.sleep(max(0.0, start - time.time()))
    launcher = psutil.Process(job.process.pid)
    agent = launcher.children()[0]
    own = lambda: sum(sum(each.cpu_times()[:2]) for each in (launcher, agent))  # noqa: E731
    threads = answering(agent.children(recursive=True))
    own_before, first = own(), list(map(used_ns, threads))
    before = first
    while time.time() < end - 1:
        time.sleep(LOOK_S)
        now = list(map(used_ns, threads))
        job.longest_s = max([job.longest_s, *((new - old) / 1e9 for new, old in zip(now, before, strict=True))])
        before = now
    job.own_s, job.answers_s = own() - own_before, (sum(before) - sum(first)) / 1e9


def finish(job: Job) -> None:
    output, _ = job.process.communicate()
    for number, *values in re.findall(r"slot (\d+) (\d+) (\S+) (\S+) (\S+)", output):
        job.slots[int(number)] = [old + float(new) for old, new in zip(job.slots[int(number)], values, strict=True)]
    if not job.slots:
        sys.exit(f"a job has failed:\n{output}")


def run(seconds: float) -> list[Job]:
    start = time.time() + START_S
    end = start + seconds
    jobs = [
        Job(begin(options, PROGRAMS / "slot_steps.py", index, start, end, PERIOD_S))
        for index, options in enumerate((WATCH, OFF, OFF)[: size("BENCH_RUNNING", 3, 1)])
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: follow(job, start, end), jobs))
        list(pool.map(finish, jobs))
    return jobs


def per_step(job: Job, group: int, column: int) -> float:
    """In the two slots that the job has of the group of slots."""
    slots = [values for number, values in job.slots.items() if number // SLOTS == group]
    return sum(values[column] for values in slots) / sum(values[0] for values in slots)


def ratio(one: Job, other: Job, name: str) -> str:
    """Median of the ratios of all groups of slots, with its 95 % interval from resampling."""
    groups = range(max(one.slots) // SLOTS)  # The last one may be cut.
    column = COLUMNS.index(name)
    ratios = [per_step(one, group, column) / per_step(other, group, column) for group in groups]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(4000))
    return f"{statistics.median(ratios):.4f} ({medians[100]:.4f} to {medians[-100]:.4f})"


def switches_of(process: psutil.Process) -> int:
    """Voluntary context switches of all threads."""
    statuses = (task.read_text() for task in Path(f"/proc/{process.pid}/task").glob("*/status"))
    return sum(int(text.split("voluntary_ctxt_switches:")[1].split()[0]) for text in statuses)


def wakeups(options: Sequence[str]) -> tuple[float, float]:
    """A second: of launcher and agent, and of all else, while all workers but one wait in a collective."""
    job = begin(options, HANGS, "lock")
    assert job.stdout
    for _ in range(RANKS):
        job.stdout.readline()
    time.sleep(SETTLE_S)
    launcher = psutil.Process(job.pid)
    tree = [launcher, *launcher.children(recursive=True)]
    before = list(map(switches_of, tree))
    time.sleep(IDLE_S)
    counts = [after - old for after, old in zip(map(switches_of, tree), before, strict=True)]
    launcher.terminate()
    job.wait()
    return sum(counts[:2]) / IDLE_S, sum(counts[2:]) / IDLE_S


def rows(jobs: list[Job], seconds: float) -> list[tuple[str, str, str]]:
    watched, off, control = jobs[0], jobs[len(jobs) // 2], jobs[-1]  # At the smallest size there is one job.
    steps, wall_s, cpu_s, _ = map(sum, zip(*watched.slots.values(), strict=True))
    rate = cpu_s / wall_s * RANKS  # CPU seconds of the job in a second in which it runs.
    share: Callable[[float], str] = lambda used_s: f"{used_s / seconds / rate:.4%}"  # noqa: E731
    texts = {"cpu_s": "CPU time of a step", "wall_s": "time of a step", "switches": "context switches of a step"}
    found = [(text, ratio(watched, off, name), ratio(control, off, name)) for name, text in texts.items()]
    base_s = (off.own_s + control.own_s) / 2
    return [
        *found,
        ("launcher and agent, share of the job's CPU time", share(watched.own_s - base_s), share(off.own_s - base_s)),
        ("threads that answer, share of the job's CPU time", share(watched.answers_s), share(off.answers_s)),
        ("longest delay by one sample", f"{1000 * watched.longest_s:.1f} ms", f"{1000 * off.longest_s:.1f} ms"),
        ("a step, for comparison", f"{1e3 * wall_s / steps:.2f} ms", f"{len(off.slots) // 2} groups of slots"),
    ]


def main() -> None:
    seconds = float(sys.argv[1]) if sys.argv[1:] else SECONDS
    table = rows(run(seconds), seconds)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(wakeups, (WATCH, OFF)[: size("BENCH_WAYS", 2, 1)]))
    for name, values in zip(("launcher and agent", "all others"), zip(*found, strict=True), strict=True):
        table.append((f"wake-ups a second, three ranks wait for one: {name}", *(f"{value:.2f}" for value in values)))
    print("| measure | with the watch, to without | without, to without |\n|---|---|---|")
    for row in table:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
