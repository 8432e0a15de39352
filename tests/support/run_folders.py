"""Made-up run folders for the page of a run: any number of nodes and hours, thinned as a real run leaves them."""

from __future__ import annotations

import json
import math
import random
import time
from datetime import datetime
from pathlib import Path
from typing import Any

START = 1_795_000_000.0
RANKS_PER_NODE = 8
_LINES = 500
"""Samples that are kept of a node, however long the run."""


def write(
    folder: Path,
    *,
    nodes: int = 2,
    hours: float = 1.0,
    outcome: str = "failed",
    lines: int = _LINES,
    message: str = "KeyError: 'lr'",
    has_samples: bool = True,
) -> Path:
    """A run of two attempts: the first loses a node, which a spare replaces; ends as ``outcome`` says."""
    folder.mkdir(parents=True, exist_ok=True)
    end = START + hours * 3600
    lost = START + hours * 3600 * 0.4
    hosts = [f"gpu{number}" for number in range(1, nodes + 1)]
    spare = f"gpu{nodes + 1}"
    (folder / ".ddplaunch-run").write_text("")
    body = {
        "schema": 1,
        "run_id": "20261122-083320-a1b2c3",
        "run_tag": "x",
        "script": "train.py",
        "command": ["ddplaunch", "--hosts", "gpu[1-9]", "train.py", "--lr", "1e-3"],
        "cwd": "/home/ada/train",
        "start": _iso(START),
        "host": "login1",
        "pid": 11,
    }
    (folder / "run.json").write_text(json.dumps(body))
    (folder / "report.json").write_text(json.dumps(_report(hosts, spare, lost, end, outcome, message)))
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in _events(hosts, spare, lost, end, outcome))
    )
    if has_samples:
        (folder / "samples").mkdir(exist_ok=True)
        for index, host in enumerate([*hosts, spare]):
            span = (
                (START + 60, lost) if index == nodes - 1 else (lost + 70, end) if index == nodes else (START + 60, end)
            )
            _samples(folder / "samples" / f"node_{index}.jsonl", index, host, span, lines)
    return folder


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().isoformat()


def _exit(rank: int, host: str, end: float, length: float, code: int, **more: Any) -> dict[str, Any]:
    worker = {"rank": rank, "local_rank": rank % RANKS_PER_NODE, "host": host, "pid": 1000 + rank, "returncode": code}
    times = {"stopped": code == -15, "time_s": end, "duration_s": length, "error": None, "tail": [], "log_file": None}
    return {**worker, **times, **more}


def _report(hosts: list[str], spare: str, lost: float, end: float, outcome: str, message: str) -> dict[str, Any]:
    final = [*hosts[:-1], spare]
    first, second = lost - START - 45, end - lost - 60
    exits = [
        [_exit(n * 8 + local, host, lost, first, -15) for n, host in enumerate(hosts[:-1]) for local in range(8)],
        [
            _exit(n * 8 + local, host, end, second, 0 if outcome == "succeeded" else -15)
            for n, host in enumerate(final)
            for local in range(8)
        ],
    ]
    failure = None
    if outcome == "failed":
        frames = (("41, in <module>", "main()"), ("33, in main", 'rate = config["lr"]'))
        shown = "".join(f'  File "/home/ada/train/train.py", line {at}\n    {code}\n' for at, code in frames)
        trace = f"Traceback (most recent call last):\n{shown}{message}\n"
        tail = [f"[rank3]: {line}" for line in trace.splitlines()]
        error = {"message": message, "traceback": trace, "time_s": end - 2}
        failure = _exit(
            3, hosts[0], end - 2, second - 2, 1, error=error, tail=tail, log_file="/logs/attempt_1/3/stderr.log"
        )
        exits[1][3] = failure
    attempts = [
        {
            "attempt": 0,
            "outcome": "failed",
            "exits": exits[0],
            "duration_s": first,
            "attempt_follows": True,
            "reason": f"{hosts[-1]} has not answered for 5 s",
            "restart_count": 0,
        },
        {
            "attempt": 1,
            "outcome": outcome,
            "exits": exits[1],
            "duration_s": second,
            "attempt_follows": False,
            "reason": "",
            "decision": "not restarted: 1 of 1 restarts used" if outcome == "failed" else "",
            "restart_count": 0,
        },
    ]
    return {
        "schema": 2,
        "run_id": "20261122-083320-a1b2c3",
        "exit_code": 0 if outcome == "succeeded" else 1,
        "outcome": outcome,
        "duration_s": end - START,
        "attempts": attempts,
        "first_failure": failure,
        "start": _iso(START),
        "end": _iso(end),
        "versions": {"ddplaunch": "0.1.0", "python": "3.12.3", "torch": "2.9.0"},
        "hosts": [
            {"host": host, "workers": 8, "cpus": 96, "gpus": ["NVIDIA H100 80GB HBM3"] * 8} for host in [*hosts, spare]
        ],
        "collectives": [
            {
                "rank": 3,
                "host": hosts[0],
                "collectives": 9000,
                "delayed": 800,
                "last": 640,
                "median_s": 0.012,
                "p95_s": 0.05,
                "cost_share": 0.034,
                "warning": "rank 3 on gpu1 is late: its GPU is throttled",
            },
            {
                "rank": 5,
                "host": hosts[0],
                "collectives": 9000,
                "delayed": 800,
                "last": 40,
                "median_s": 0.002,
                "p95_s": 0.01,
                "cost_share": 0.002,
                "warning": "",
            },
        ],
        "health": [
            {
                "host": hosts[0],
                "time_s": lost,
                "rule": "thermal-slowdown",
                "text": "GPU 3 is throttled because of its temperature",
                "action": "check the cooling",
                "severity": "warn",
                "gpu": 3,
                "uuid": "",
                "ranks": [3],
            }
        ],
    }


def _events(hosts: list[str], spare: str, lost: float, end: float, outcome: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"schema": 1, "t": START, "event": "run_started", "text": "job"}]
    for index, host in enumerate(hosts):
        found.append({"t": START + 3, "event": "agent_ready", "node": index, "host": host, "workers": 8})
    final = [*hosts[:-1], spare]
    for attempt, at, names in ((0, START + 45, hosts), (1, lost + 60, final)):
        for index, host in enumerate(names):
            found.append(
                {
                    "t": at,
                    "event": "attempt_started",
                    "attempt": attempt,
                    "node": index,
                    "host": host,
                    "workers": 8,
                    "first_rank": index * 8,
                    "world_size": len(names) * 8,
                    "import_s": 21.0,
                }
            )
        found.append({"t": at + 2, "event": "first_output", "attempt": attempt, "host": names[0], "rank": 0})
        if attempt == 0:
            quiet = START + (lost - START) * 0.5
            found.append({"t": quiet, "event": "quiet", "attempt": 0})
            found.append({"t": quiet + (lost - START) * 0.1, "event": "active", "attempt": 0, "s": 5.0})
            found.append(
                {
                    "t": quiet + (lost - START) * 0.05,
                    "event": "hang_reported",
                    "text": "nothing has moved for 5 min: the job seems to hang",
                }
            )
            found.append(
                {"t": quiet + (lost - START) * 0.1, "event": "moves_again", "text": "the job moves again, after 10 min"}
            )
            found.append(
                {
                    "t": lost,
                    "event": "health",
                    "node": 0,
                    "host": hosts[0],
                    "gpu": 3,
                    "rule": "thermal-slowdown",
                    "severity": "warn",
                    "text": "GPU 3 is throttled because of its temperature",
                }
            )
            found.append(
                {
                    "t": lost + 1,
                    "event": "node_lost",
                    "node": len(hosts) - 1,
                    "host": hosts[-1],
                    "text": f"{hosts[-1]} has not answered for 5 s",
                }
            )
            found.append({"t": lost + 1, "event": "message", "level": 0, "text": f"{spare} replaces {hosts[-1]}"})
            found += [
                {
                    "t": lost + 2,
                    "event": "attempt_ended",
                    "attempt": 0,
                    "node": index,
                    "host": host,
                    "outcome": "stopped",
                }
                for index, host in enumerate(hosts[:-1])
            ]
            found.append({"t": lost + 2, "event": "restart", "text": "the workers start again"})
            found.append({"t": lost + 30, "event": "node_joined", "node": len(hosts), "host": spare, "workers": 8})
    if outcome == "failed":
        found.append(
            {
                "t": end - 2,
                "event": "worker_failed",
                "attempt": 1,
                "node": 0,
                "host": hosts[0],
                "rank": 3,
                "text": "rank 3 on gpu1 failed: KeyError: 'lr' (train.py:33)",
            }
        )
    found += [
        {"t": end - 1, "event": "attempt_ended", "attempt": 1, "node": index, "host": host, "outcome": outcome}
        for index, host in enumerate(final)
    ]
    found.append({"t": end, "event": "run_ended", "outcome": outcome, "exit_code": 0 if outcome == "succeeded" else 1})
    return found


def _samples(path: Path, index: int, host: str, span: tuple[float, float], lines: int) -> None:
    rng = random.Random(index)
    gpus = [{"index": local, "uuid": f"GPU-{index}-{local}", "name": "NVIDIA H100"} for local in range(8)]
    rows: list[dict[str, Any]] = [
        {"schema": 1, "node": index, "host": host, "cpus": 96, "memory": 1 << 40, "gpus": gpus},
        {"attempt": 0, "t": span[0], "ranks": list(range(index * 8, index * 8 + 8)), "gpu": list(range(8))},
    ]
    step = (span[1] - span[0]) / lines
    for number in range(lines):
        slow = 0.35 if index == 0 else 1.0
        wave = 2 * math.sin(number / 17)
        util = [round((94 + wave + rng.uniform(-3, 3)) * (slow if local == 3 else 1), 1) for local in range(8)]
        rows.append(
            {
                "t": round(span[0] + step * (number + 1), 3),
                "s": round(step, 3),
                "n": {
                    "cpu": round(30 + wave + rng.random() * 4, 1),
                    "mem": int(2.1e11 + number * 1e7),
                    "disk": 41.5,
                    "rx": int(2.4e9 + rng.random() * 1e8),
                    "tx": int(2.3e9 + rng.random() * 1e8),
                },
                "w": {
                    "cpu": [round(98 + rng.uniform(-9, 9), 1) for _ in range(8)],
                    "rss": [int(1.4e10 + number * 1e6 + rng.random() * 1e8) for _ in range(8)],
                    "rd": [int(rng.random() * 2e7) for _ in range(8)],
                    "wr": [int(rng.random() * 2e5) for _ in range(8)],
                    "quiet": [round(rng.random() * 9, 1) for _ in range(8)],
                    "lines": [round(0.2 + rng.random() * 0.1, 3) for _ in range(8)],
                },
                "g": {
                    "util": util,
                    "mem": [int(6.8e10 + rng.random() * 1e8) for _ in range(8)],
                    "power": [
                        round(620 + wave * 9 + rng.uniform(-20, 20)) * (0.6 if index == 0 and local == 3 else 1)
                        for local in range(8)
                    ],
                    "temp": [
                        round(61 + wave + rng.random() * 4 + (24 if index == 0 and local == 3 else 0))
                        for local in range(8)
                    ],
                    "throttle": [
                        "thermal slowdown (hardware)" if index == 0 and local == 3 and number > lines / 2 else None
                        for local in range(8)
                    ],
                },
            }
        )
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


if __name__ == "__main__":
    import sys

    target = write(Path(sys.argv[1]), nodes=int(sys.argv[2]), hours=float(sys.argv[3]))
    began = time.monotonic()
    print(target, time.monotonic() - began)
