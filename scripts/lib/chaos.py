"""Chaos test: ``chaos.py [SECONDS] [SEED]`` runs jobs on four virtual hosts and kills processes and nodes at random.

A job passes if it exits with 0, or with 84 when fewer than two nodes were left, and no process is left on any host.
Prints a line per job and a total; exits with 1 if a job failed. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.nodes import Keys, Lab  # noqa: E402
from tests.support.processes import wait_until  # noqa: E402

HOSTS, MIN_NODES, KILLS = 4, 2, 4
NODE_LOST, END_S = 84, 60.0
VICTIMS = ("worker", "agent", "forkserver", "member", "store", "node", "cut")
SIGNS = {"agent": "DDPLAUNCH_START", "forkserver": "ddplaunch forkserver", "member": "ddplaunch member"}


def main() -> None:
    limit_s = float(sys.argv[1]) if len(sys.argv) > 1 else 240.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    print(f"seed {seed}", flush=True)
    rng, deadline, failed, count = random.Random(seed), time.monotonic() + limit_s, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        keys = Keys(Path(folder))
        while time.monotonic() < deadline:
            count += 1
            (place := Path(folder) / f"job{count}").mkdir()
            failed += not one_job(rng, keys, place)
    print(f"{count} jobs, {failed} failed")
    sys.exit(failed > 0)


def one_job(rng: random.Random, keys: Keys, place: Path) -> bool:
    with Lab(place / "lab", keys, HOSTS) as lab, open(place / "output", "wb") as output:
        launcher = start(lab, place, output)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: b" in round 0" in (place / "output").read_bytes(), 30)
        done, lost = [], 0
        for _ in range(rng.randint(1, KILLS)):
            victim = rng.choice(VICTIMS)
            name = rng.choice(lab.nodes).name
            if inject(lab, name, victim):
                done.append(f"{victim} {name}")
                lost += victim in ("node", "cut", "agent")
            time.sleep(rng.uniform(0.1, 2.5))
        (place / "end").touch()
        return judge(lab, launcher, place, done, lost)


def start(lab: Lab, place: Path, output: object) -> subprocess.Popen[bytes]:
    hosts = ",".join(node.name for node in lab.nodes)
    options = ("--hosts", hosts, "--ssh-config", str(lab.ssh_config), "--nnodes", f"{MIN_NODES}:{HOSTS}", "-v")
    more = ("--nproc-per-node", "2", "--max-restarts", "20", "--shutdown-timeout", "2")
    script = str(ROOT / "tests/support/programs/rounds.py")
    command = [sys.executable, "-m", "ddplaunch", *options, *more, script, str(place / "end")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(place), "OMP_NUM_THREADS": "1"}
    return lab.popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)


def inject(lab: Lab, name: str, victim: str) -> bool:
    """Kill ``victim`` on the node ``name``. Returns False if it does not run there."""
    node = lab[name]
    pids = {pid: line for pid, line in node.pids().items()} if node.options else {}
    if victim == "node":
        node.crash()
        return bool(pids)
    if victim == "cut":
        node.unplug()
        return bool(pids)
    sign = SIGNS.get(victim, "rounds.py" if victim == "worker" else "ddplaunch store")
    found = [pid for pid, line in pids.items() if sign in line]
    for pid in found[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def judge(lab: Lab, launcher: subprocess.Popen[bytes], place: Path, done: list[str], lost: int) -> bool:
    began = time.monotonic()
    try:
        code = launcher.wait(END_S)
        wait_until(lambda: not lab.leftovers(), 15)
        passed = code == 0 or (code == NODE_LOST and lost > HOSTS - MIN_NODES)
        why = "" if passed else "unexpected exit code"
    except (subprocess.TimeoutExpired, TimeoutError):
        passed, why, code = False, f"hangs, or left processes: {lab.leftovers()}", launcher.poll()
        launcher.kill()
        launcher.wait()
    took_s = time.monotonic() - began
    print(
        f"{'ok' if passed else 'FAILED'}: code {code}, {took_s:.1f} s after the last of {done} {why}",
        flush=True,
    )
    if not passed:
        print((place / "output").read_text(errors="replace")[-6000:], flush=True)
    return passed


if __name__ == "__main__":
    main()
