"""How surely a slow rank is named, how often an even job is accused, and what the samples cost.

``slow_ranks.py [RUNS]``. Samples are taken every 10 s in place of 60 s. Even jobs are even only on a machine that has
nothing else to do: run this with at least as many free cores as JOBS.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import PROGRAMS, REPEATS, size

from ddplaunch.features.slow_ranks.records import CollectivesSampled, pack
from ddplaunch.features.slow_ranks.slow_ranks import warning, window

RUNS = int(sys.argv[1]) if len(sys.argv) > 1 else size("BENCH_ROUNDS", 20, 0)
EVEN_RUNS = size("BENCH_EVEN_ROUNDS", RUNS, 0)
SLOW_S, STEPS_S = size("BENCH_RUN_S", 35.0, 1.0), size("BENCH_STEPS_S", 45.0, 0.2)
WAYS = (("with --hang-report off", ("--hang-report", "off")), ("with samples", ()))[: size("BENCH_WAYS", 2, 1)]
JOBS = 4
"""Jobs at a time: their steps are pauses, which need no CPU."""

EVEN_MADE_UP = size("BENCH_MADE_UP", 80, 1)
LAUNCH = """
import sys
from ddplaunch.features.slow_ranks import launcher as watch
watch._FIRST_S, watch._PERIOD_S, watch._PERIOD_PER_COST = 5.0, 10.0, float(sys.argv.pop(1))
from ddplaunch.cli.main import main
main()
"""


def job(step_s: float, slow: int, extra_s: float, run_s: float, *options: str, period_per_cost: int = 400) -> str:
    """Run a job of four ranks. Returns its output and its warnings."""
    with tempfile.TemporaryDirectory() as logs:
        program = [str(PROGRAMS / "steps.py"), *map(str, (step_s, slow, extra_s, run_s))]
        own = ["--nproc-per-node", "4", "--log-dir", logs, *options]
        command = [sys.executable, "-c", LAUNCH, str(period_per_cost), *own, *program]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        reports = list(Path(logs).glob("*/report.json"))
        if done.returncode or not reports:
            sys.exit(done.stdout + done.stderr)
        lateness = json.loads(reports[0].read_text())["collectives"]
        return "\n".join([done.stdout, *(each["warning"] for each in lateness if each["warning"])])


def slow_rank_is_named(run: int) -> bool:
    return f"\nrank {run % 4} on " in job(0.1, run % 4, 0.02, SLOW_S)


def even_job_is_accused(_run: int) -> bool:
    return "is last in" in job(0.1, -1, 0.0, SLOW_S)


def made_up_job_is_accused(run: int) -> bool:
    """Eight ranks with clocks of their own host, and a jitter of 0.1 to 50 % of the step."""
    chance = random.Random(run)
    jitter_s, now = 0.1 * chance.choice((0.001, 0.01, 0.05, 0.2, 0.5)), 1e9
    created: list[list[int]] = [[] for _ in range(8)]
    for _ in range(600):
        arrivals = [now + 0.1 + chance.expovariate(1 / jitter_s) for _ in created]
        for rank, at in enumerate(arrivals):
            created[rank].append(int((at + 100.0 * (rank // 4)) * 1e9))
        now = max(arrivals)
    times = [pack(rank, "0", dict(enumerate(at, 1))) for rank, at in enumerate(created)]
    answers = [CollectivesSampled(0, 1, f"gpu{host}", tuple(times[4 * host : 4 * host + 4])) for host in range(2)]
    error_ns = int(1e9 * chance.choice((0.0001, 0.001, 0.01)))
    clocks = {f"gpu{host}": (10**11 * host - error_ns, 10**11 * host + error_ns) for host in range(2)}
    found, _, _ = window(answers)
    ranks, hosts, _ = window(answers, clocks=clocks)
    return bool(warning(found.lateness()) or warning(ranks.lateness()) or warning(hosts.lateness(), of_hosts=True))


def steps(*options: str) -> int:
    found = re.search(r"steps (\d+)", job(0.001, -1, 0.0, STEPS_S, *options))
    return int(found[1]) if found else 0


def main() -> None:
    with ThreadPoolExecutor(JOBS) as jobs:
        named = sum(jobs.map(slow_rank_is_named, range(RUNS)))
        print(f"a rank that takes 20 ms longer for a step of 100 ms was named in {named} of {RUNS} jobs", flush=True)
        accused = sum(jobs.map(even_job_is_accused, range(EVEN_RUNS)))
        print(f"even jobs with a warning: {accused} of {EVEN_RUNS}", flush=True)
    made_up = sum(map(made_up_job_is_accused, range(EVEN_MADE_UP)))
    print(f"even jobs with a warning, made-up times: {made_up} of {EVEN_MADE_UP}", flush=True)
    for _ in range(min(3, REPEATS)):
        counts = "; ".join(f"{name} {steps(*options)}" for name, options in WAYS)
        print(f"steps of 1 ms in {STEPS_S:g} s: {counts}", flush=True)


if __name__ == "__main__":
    main()
