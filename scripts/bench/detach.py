"""A run that is left and looked at: what ends with the shell, how soon a viewer shows a line, what viewers cost.

- The shell that has started a detached run, and its whole session, are killed by SIGKILL or get SIGHUP: the run must
  end with its own exit code every time.
- Time of the command ``--detach``.
- Time from the command ``--attach`` until its first line, and until the first line of the run.
- Time of a run that prints many lines, with ten viewers, one of them stopped, and without: in turns.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import DDPLAUNCH, PROGRAMS, REPEATS, size

ROUNDS = size("BENCH_ROUNDS", 20, 1)
LINES = size("BENCH_LINES", 200_000, 100)
WORKERS, VIEWERS, CODE = 4, size("BENCH_VIEWERS", 10, 1), 7
LIMIT_S = 120.0
SIGNALS = (signal.SIGKILL, signal.SIGHUP)[: size("BENCH_SIGNALS", 2, 1)]

UNTIL = f'echo begins; while [ ! -e "$0" ]; do sleep 0.05; done; exit {CODE}'


def detached(folder: Path, *job: str) -> str:
    """The run id of a detached run."""
    command = (*DDPLAUNCH, "--detach", "-q", "--log-dir", str(folder), *job)
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, text=True
    ).stdout.strip()


def wait_for(path: Path, text: str = "") -> str:
    """The content of a file, once it exists and has ``text``."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if path.exists() and text in (content := path.read_text(errors="replace")):
            return content
        time.sleep(0.01)
    sys.exit(f"{path}: no {text!r} within {LIMIT_S:g} s")


def wait_for_end(run_id: str, log_dir: str) -> subprocess.Popen[bytes]:
    """A process that ends with the run, with its exit code."""
    return subprocess.Popen((*DDPLAUNCH, "--wait", run_id, "--log-dir", log_dir))


def processes_of(session: int) -> list[int]:
    """All processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def ends_with_its_code(signum: int) -> bool:
    """Whether a detached run ends with its code, after the session of its shell has got this signal."""
    with tempfile.TemporaryDirectory() as name:
        folder, go = Path(name), Path(name, "go")
        words = (*DDPLAUNCH, "--detach", "-q", "--log-dir", name, "--no-python", "sh", "-c", UNTIL, str(go))
        shell = subprocess.Popen(
            ("sh", "-c", '"$@"; exec sleep 1000', "sh", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert shell.stdout
        run_id = shell.stdout.readline().strip()
        wait_for(folder / run_id / "console.log", "begins")
        for pid in processes_of(shell.pid):
            os.kill(pid, signum)
        shell.wait()
        shell.stdout.close()
        go.touch()
        return wait_for_end(run_id, name).wait() == CODE


def first_lines() -> tuple[float, float, float]:
    """Seconds of ``--detach``; from ``--attach`` until the viewer's first line, and until the first line of the run."""
    with tempfile.TemporaryDirectory() as name:
        go = Path(name, "go")
        started = time.perf_counter()
        run_id = detached(Path(name), "--nproc-per-node", "2", "--no-python", "sh", "-c", UNTIL, str(go))
        detach_s = time.perf_counter() - started
        wait_for(Path(name, run_id, "console.log"), "begins")
        started = time.perf_counter()
        viewer = subprocess.Popen(
            (*DDPLAUNCH, "--attach", run_id, "--log-dir", name), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert viewer.stdout
        assert viewer.stderr
        viewer.stderr.readline()
        own_s = time.perf_counter() - started
        viewer.stdout.readline()
        runs_s = time.perf_counter() - started
        go.touch()
        with viewer:
            viewer.communicate()
        return detach_s, own_s, runs_s


def seconds_of_lines(viewers: int) -> float:
    """Seconds from the first to the last line of a run that prints, with so many viewers; one of several is stopped."""
    with tempfile.TemporaryDirectory() as name:
        go = Path(name, "go")
        program = f'while [ ! -e "$0" ]; do sleep 0.01; done; exec {sys.executable} {PROGRAMS}/print_lines.py {LINES}'
        run_id = detached(Path(name), "--nproc-per-node", str(WORKERS), "--no-python", "sh", "-c", program, str(go))
        command = (*DDPLAUNCH, "--attach", run_id, "--log-dir", name)
        started = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for _ in range(viewers)
        ]
        for viewer in started:
            assert viewer.stderr
            viewer.stderr.readline()
        if started:
            started[0].send_signal(signal.SIGSTOP)
        waiting = wait_for_end(run_id, name)
        time.sleep(1.0)  # It has imported its modules then.
        begun = time.perf_counter()
        go.touch()
        if waiting.wait():
            sys.exit(f"{run_id} has failed")
        elapsed = time.perf_counter() - begun
        if started:
            started[0].send_signal(signal.SIGCONT)
        for viewer in started:
            viewer.communicate()
            assert viewer.returncode == 0
        check(Path(name, run_id))
        return elapsed


def check(folder: Path) -> None:
    """Exit unless console.log has every line."""
    count = (folder / "console.log").read_bytes().count(b" loss ")
    earlier = folder / "console.log.1"
    count += earlier.read_bytes().count(b" loss ") if earlier.exists() else 0
    if count != WORKERS * LINES:
        sys.exit(f"{folder}: {count} lines in console.log instead of {WORKERS * LINES}")


def main() -> None:
    """Print the figures."""
    print(f"load of the last minute: {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs", flush=True)
    for signum in SIGNALS:
        good = sum(ends_with_its_code(signum) for _ in range(ROUNDS))
        print(
            f"session of the shell, {signum.name}: the run has ended with its own code in {good} of {ROUNDS}",
            flush=True,
        )
    detach, own, runs = zip(*(first_lines() for _ in range(ROUNDS)), strict=True)
    print(f"--detach: returns after {statistics.median(detach):.3f} s (at most {max(detach):.3f} s)", flush=True)
    print(
        f"--attach: first line after {statistics.median(own):.3f} s, the run's after {statistics.median(runs):.3f} s "
        f"(at most {max(own):.3f} s and {max(runs):.3f} s)",
        flush=True,
    )
    pairs = [(seconds_of_lines(0), seconds_of_lines(VIEWERS)) for _ in range(REPEATS)]
    without, with_viewers = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{WORKERS * LINES:,} lines: {without:.2f} s without a viewer, {with_viewers:.2f} s with {VIEWERS}, "
        f"one of them stopped: throughput {without / with_viewers:.2f}x (pairs: "
        f"{', '.join(f'{first / second:.2f}' for first, second in pairs)})"
    )


if __name__ == "__main__":
    main()
