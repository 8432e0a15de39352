"""What a Python environment on a slow shared file system costs a start, and --env's copy saves; needs root and FUSE.

The environment of this interpreter is shown by ``programs/slow_fs.py``, which answers each request a millisecond later;
before each start it is mounted anew, so that the kernel has nothing of it in memory. ``--env`` makes an environment of
the same packages on the local disk. The launcher's own Python is from the slow file system, too, where nothing else is
said; Python's standard library is on the local disk in all rows. Medians; all in a mount namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import IS_SMALLEST, PROGRAMS, REPEATS, print_table

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from tests.support import wheels  # noqa: E402

JOB = ("--nproc-per-node", "2", str(PROGRAMS / ("first_line.py" if IS_SMALLEST else "all_reduce.py")))
TORCHRUN, DDPLAUNCH = ("-m", "torch.distributed.run"), ("-m", "ddplaunch")
_IN_NAMESPACE = "DDPLAUNCH_BENCH_NAMESPACE"


@contextlib.contextmanager
def slow_environment(folder: Path) -> Iterator[str]:
    """The interpreter of this environment on a slow file system of which nothing is in memory."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(PROGRAMS / "slow_fs.py"), sys.prefix, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout
        if not server.stdout.readline():
            sys.exit("the slow file system cannot be mounted")
        try:
            yield str(folder / "bin" / "python")
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
            server.kill()


def seconds(command: Sequence[str], env: dict[str, str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def main() -> None:
    if _IN_NAMESPACE not in os.environ:
        os.environ[_IN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if IS_SMALLEST:
            wheels.torch_wheel(folder / "wheels")
        else:
            wheels.repacked(folder / "wheels", ("torch", "numpy"))
        (folder / "requirements.txt").write_text("torch\n" if IS_SMALLEST else "torch\nnumpy\n")
        uv = {"PATH": f"{Path(wheels.uv()).parent}:{os.environ['PATH']}", "UV_CACHE_DIR": str(folder / "uv")}
        env = {**os.environ, "XDG_STATE_HOME": name, "DDPLAUNCH_PAGE": "off", **uv}
        made = ("--env", f"{name}/requirements.txt", "--env-wheels", f"{name}/wheels", "--env-dir", name)

        def on_slow(*arguments: str) -> float:
            with slow_environment(folder / "slow") as python:
                return seconds((python, *arguments, *JOB), env)

        def on_local(*arguments: str) -> float:
            return seconds((sys.executable, *arguments, *JOB), env)

        first_s = on_local(*DDPLAUNCH, *made)
        cases = {
            "torchrun, local disk": lambda: on_local(*DDPLAUNCH if IS_SMALLEST else TORCHRUN),
            "ddplaunch, local disk": lambda: on_local(*DDPLAUNCH),
            "torchrun, slow": lambda: on_slow(*DDPLAUNCH if IS_SMALLEST else TORCHRUN),
            "ddplaunch, slow": lambda: on_slow(*DDPLAUNCH),
            "ddplaunch --env, launcher local": lambda: on_local(*DDPLAUNCH, *made),
            "ddplaunch --env, launcher slow": lambda: on_slow(*DDPLAUNCH, *made),
        }
        taken = [{case: run() for case, run in cases.items()} for _ in range(REPEATS)]
        found = {case: statistics.median(turn[case] for turn in taken) for case in cases}
    local_s = found["ddplaunch, local disk"]

    def row(measure: str, torchrun: str, ddplaunch: str) -> tuple[str, str, str, str]:
        of_torchrun, of_ddplaunch = (f"{found[each]:.2f} s" if each else "-" for each in (torchrun, ddplaunch))
        return measure, of_torchrun, of_ddplaunch, f"{found[ddplaunch] / local_s:.2f} x local"

    rows = [
        row("environment on the local disk", "torchrun, local disk", "ddplaunch, local disk"),
        row("environment on the slow file system", "torchrun, slow", "ddplaunch, slow"),
        row("`--env`, the launcher on the local disk", "", "ddplaunch --env, launcher local"),
        row("`--env`, the launcher on the slow file system", "", "ddplaunch --env, launcher slow"),
        ("`--env` for the first time, with local wheels", "-", f"{first_s:.2f} s", f"{first_s / local_s:.2f} x local"),
    ]
    print_table("a start of 2 workers, whole command", rows)


if __name__ == "__main__":
    main()
