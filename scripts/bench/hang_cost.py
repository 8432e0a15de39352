"""What the watch for hangs and slow ranks costs a job of four ranks that steps as fast as it can.

``hang_cost.py [PAIRS [SECONDS]]``: two jobs, one with the watch and one with ``--hang-report off``, run side by side,
so that other load on the machine affects both. CPU time and context switches for a step hardly depend on that load; the
time of a step does. ``SECONDS`` should be more than 60: the watch reads the whole flight record once a minute.
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from common import DDPLAUNCH, PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence

HANGS = Path(__file__).resolve().parents[2] / "tests" / "support" / "programs" / "hangs.py"
WATCHED = {"with the watch": (), "with --hang-report off": ("--hang-report", "off")}
RANKS = 4
START_S = 20.0
IDLE_S = 30.0


@dataclass(frozen=True)
class Used:
    """What the ranks of one job used, for one step; ``answers``: the share of the time that a rank's answers took."""

    wall_us: float
    cpu_us: float
    switches: float
    answers: float


def command(options: Sequence[str], program: Path, *arguments: str) -> tuple[str, ...]:
    own = ("--nproc-per-node", str(RANKS), "--log-dir", "/dev/null", *options)
    return *DDPLAUNCH, *own, str(program), *arguments


def steps(options: Sequence[str], start: float, end: float) -> Used:
    done = subprocess.run(
        command(options, PROGRAMS / "step_times.py", str(start), str(end)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    rows = [list(map(float, line.split())) for line in re.findall(r"steps (\d+ .*)", done.stdout)]
    if len(rows) != RANKS:
        sys.exit(done.stdout + done.stderr)
    count, wall_s, cpu_s, switches, answer_s = map(sum, zip(*rows, strict=True))
    return Used(1e6 * wall_s / count, 1e6 * cpu_s / count, switches / count, answer_s / wall_s)


def pair(seconds: float) -> list[Used]:
    start = time.time() + START_S
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda options: steps(options, start, start + seconds), WATCHED.values()))


def ratio(name: str, pairs: Sequence[Sequence[Used]]) -> str:
    """Mean of the ratios of all pairs, with its 95 % interval from resampling."""
    ratios = [getattr(one, name) / getattr(other, name) for one, other in pairs]
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return f"{statistics.fmean(ratios):.4f} ({means[250]:.4f} to {means[-250]:.4f})"


def switches_of(process: psutil.Process) -> int:
    """Voluntary context switches of all threads."""
    statuses = (task.read_text() for task in Path(f"/proc/{process.pid}/task").glob("*/status"))
    return sum(int(text.split("voluntary_ctxt_switches:")[1].split()[0]) for text in statuses)


def wakeups(options: Sequence[str]) -> tuple[float, float]:
    """A second: of launcher and agent, and of all else, while all workers but one wait in a collective."""
    job = subprocess.Popen(command(options, HANGS, "lock"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert job.stdout
    for _ in range(RANKS):
        job.stdout.readline()
    time.sleep(5)
    launcher = psutil.Process(job.pid)
    tree = [launcher, *launcher.children(recursive=True)]
    before = list(map(switches_of, tree))
    time.sleep(IDLE_S)
    counts = [after - old for after, old in zip(map(switches_of, tree), before, strict=True)]
    launcher.terminate()
    job.wait()
    return sum(counts[:2]) / IDLE_S, sum(counts[2:]) / IDLE_S


def main() -> None:
    count, seconds = int(sys.argv[1]) if sys.argv[1:] else 10, float(sys.argv[2]) if sys.argv[2:] else 75.0
    pairs = []
    for _ in range(count):
        pairs.append(pair(seconds))
        print(*pairs[-1], sep="\n", flush=True)
    for number, name in enumerate(WATCHED):
        column = [each[number] for each in pairs]
        medians = (statistics.median(getattr(each, field) for each in column) for field in Used.__annotations__)
        texts = (
            "step {:.1f} us",
            "CPU of a rank for a step {:.1f} us",
            "context switches {:.2f}",
            "answers to the watch {:.4%} of the time",
        )
        print(f"{name}:", ", ".join(text.format(value) for text, value in zip(texts, medians, strict=True)))
    for field in ("wall_us", "cpu_us", "switches"):
        print(f"ratio of {field}: {ratio(field, pairs)}", flush=True)
    with ThreadPoolExecutor() as pool:
        for name, found in zip(WATCHED, pool.map(wakeups, WATCHED.values()), strict=True):
            print(f"{name}: wake-ups a second: launcher and agent {found[0]:.2f}, all others {found[1]:.2f}")


if __name__ == "__main__":
    main()
