"""`srun torchrun` compared with `srun ddplaunch`, in turns, in one SLURM allocation; needs root and SLURM.

The cluster comes from ``tests/support/slurm.py``: two virtual hosts, one task per host, two workers per task. As in
`restart.py`, torchrun does not share its TCPStore. Measures that take torchrun a minute run once with torchrun.

A second table is about the agents that one `ddplaunch` starts in an allocation: how long until all have answered, how
many steps of SLURM that took, and the CPU time of the launcher and of srun. All nodes share this machine, and so the
time is mostly that of their agents. BENCH_CHECKOUT=FOLDER measures another checkout.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from common import DDPLAUNCH, IS_SMALLEST, PROGRAMS, REPEATS, TORCHRUN, print_table, size

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from tests.support import nodes  # noqa: E402
from tests.support import slurm as cluster  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.slurm import Slurm

NODES, WORKERS = 2, 2
RANKS = NODES * WORKERS
SCRIPT = str(PROGRAMS / "many_nodes.py")
GIVE_UP_S = 60.0
STARTS = size("BENCH_STARTS", (2, 8, 64), (2,))
KILL_ON_BAD_EXIT = "a rank raises, `srun --kill-on-bad-exit=1` -> all workers gone"


class Bench:
    """An allocation; runs job steps in it, one at a time."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        output = slurm.start(["salloc", f"--nodes={NODES}", "--no-shell"]).finish().err
        self._job = next(word for word in output.split() if word.isdecimal())

    @contextmanager
    def step(self, torchrun: bool, options: Sequence[str], *run: str) -> Iterator[Path]:
        """Run a step whose script gets the yielded folder as last argument; on exit no process of it is left."""
        with tempfile.TemporaryDirectory() as folder:
            endpoint = f"{self._slurm.lab.nodes[0].address}:29400"
            meet = ("--nnodes", str(NODES), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint) if torchrun else ()
            launcher = (*(TORCHRUN if torchrun else DDPLAUNCH), *meet, "--nproc-per-node", str(WORKERS))
            srun = ("srun", f"--jobid={self._job}", "--overlap", f"--nodes={NODES}", "--ntasks-per-node=1")
            env = {"XDG_STATE_HOME": folder, "TIMES": folder, "OMP_NUM_THREADS": "1"}
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running = self._slurm.start((*srun, *options, *launcher, *run, folder), env=env, **quiet)
            try:
                yield Path(folder)
            finally:
                running.signal(signal.SIGTERM)  # srun SIGKILLs its tasks then; torchrun's workers survive that.
                running.finish()
                wait_for(self._clear)

    def _clear(self) -> bool:
        left = [pid for pids in self._slurm.leftovers().values() for pid in pids]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def workers(self) -> int:
        """The number of workers on all nodes. Command lines of launchers contain the script too, but with --nproc."""
        lines = [line for pids in self._slurm.leftovers().values() for line in pids.values()]
        return sum(SCRIPT in line and "--nproc" not in line for line in lines)

    def start_s(self, torchrun: bool) -> float:
        """Seconds from the start of srun until all ranks have finished an all-reduce."""
        began = time.time()
        with self.step(torchrun, (), SCRIPT, "stay") as folder:
            return wait_for(lambda: len(list(folder.glob("ready.0.*"))) >= RANKS) - began

    def failure_s(self, torchrun: bool, *options: str) -> float:
        """Seconds from a rank's exception until no worker is left on any node; the other ranks sleep."""
        with self.step(torchrun, options, SCRIPT, "raise") as folder:
            wait_for(lambda: len(list(folder.glob("ready.0.*"))) >= RANKS)
            assert self.workers() == RANKS
            wait_for((folder / "raised").exists)
            raised = float((folder / "raised").read_text())
            return wait_for(lambda: not self.workers()) - raised

    def restart_s(self, torchrun: bool) -> float:
        """Seconds from a rank's death until all ranks of both nodes have finished another all-reduce."""
        with self.step(torchrun, (), "--max-restarts", "1", str(PROGRAMS / "die_once.py")) as folder:
            wait_for(lambda: len(list(folder.glob("1.*"))) >= RANKS)
            ready = [float(path.read_text()) for path in folder.glob("1.*")]
            return max(ready, default=float("inf")) - float((folder / "death").read_text())


def wait_for(condition: Callable[[], object]) -> float:
    """The ``time.time()`` at which ``condition`` became true; infinite after ``GIVE_UP_S`` seconds."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        if condition():
            return time.time()
        time.sleep(0.005)
    return float("inf")


def shown(seconds: float) -> str:
    return f"over {GIVE_UP_S:.0f} s" if seconds == float("inf") else f"{seconds:.2f} s"


def row(name: str, measure: Callable[[bool], float], torchrun: int = REPEATS) -> tuple[str, str, str, str]:
    """A table row of medians. Both launchers take turns; ``torchrun`` is the number of measurements with torchrun."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(REPEATS):
        for is_torchrun in (True, False) if number < torchrun and not IS_SMALLEST else (False,):
            taken[is_torchrun].append(measure(is_torchrun))
    ours, theirs = (statistics.median(times or [float("inf")]) for times in taken)
    ratio = f"{'over ' if theirs == float('inf') else ''}{min(theirs, GIVE_UP_S) / ours:.0f}x faster"
    return name, shown(theirs), shown(ours), ratio


def start_of_agents(slurm: Slurm, count: int) -> tuple[float, float, int]:
    """Seconds from a command until agents of so many nodes have answered it, CPU seconds, and the number of steps."""
    names = ",".join(node.name for node in slurm.lab.nodes[:count])
    path = f"PYTHONPATH={os.environ.get('BENCH_CHECKOUT', ROOT)}"
    ask = shlex.join(("env", path, *DDPLAUNCH, "--ps", "--hosts", names))
    # The steps of a job are numbered from 0.
    line = f"date +%s.%N; {ask} >&2; date +%s.%N; srun --overlap --nodes=1 --ntasks=1 printenv SLURM_STEP_ID"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, ended, steps = slurm.run("salloc", f"--nodelist={names}", "--quiet", "sh", "-c", line).split()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(ended) - float(began), used_s, int(steps)


def print_starts(lab: nodes.Lab) -> None:
    """The table of the agents' starts."""
    print("\n| nodes | all agents have answered | CPU of launcher and srun | steps |\n|---|---|---|---|")
    with cluster.Slurm(lab) as slurm:
        for count in STARTS:
            taken = [start_of_agents(slurm, count) for _ in range(REPEATS)]
            wall_s, used_s, steps = map(statistics.median, zip(*taken, strict=True))
            print(f"| {count} | {wall_s:.2f} s | {used_s:.2f} s | {steps:.0f} |")


def main() -> None:
    if reason := nodes.why_not() or cluster.why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "keys").mkdir()
        keys = nodes.Keys(Path(folder, "keys"))
        with nodes.Lab(Path(folder, "lab"), keys, NODES) as lab, cluster.Slurm(lab) as slurm:
            bench = Bench(slurm)
            measures: tuple[Callable[[], tuple[str, str, str, str]], ...] = (
                lambda: row("srun -> all ranks ready", bench.start_s),
                lambda: row("a rank dies -> all ranks of both nodes ready again", bench.restart_s),
                lambda: row("a rank raises -> all workers of both nodes gone", bench.failure_s, torchrun=1),
                lambda: row(KILL_ON_BAD_EXIT, lambda t: bench.failure_s(t, "--kill-on-bad-exit=1")),
            )
            rows = [measure() for measure in measures[: size("BENCH_MEASURES", len(measures), 1)]]
        print_table(f"srun, {NODES} nodes x {WORKERS} workers", rows)
        with nodes.Lab(Path(folder, "starts"), keys, max(STARTS)) as lab:
            print_starts(lab)


if __name__ == "__main__":
    main()
