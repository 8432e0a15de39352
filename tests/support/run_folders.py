"""Made-up run folders for the page of a run: any number of nodes and hours, thinned as a real run leaves them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddplaunch.protocol import wire
from ddplaunch.protocol.results import AttemptResult, HealthFinding, Outcome, WorkerError, WorkerExit
from ddplaunch.protocol.run_result import NodeOfRun, RankLateness, RunResult, Versions
from ddplaunch.text import iso_time

START = 1_795_000_000.0
RUN_ID = "20261122-083320-a1b2c3"
COMMAND = ("ddplaunch", "--hosts", "gpu[1-9]", "train.py", "--lr", "1e-3")
_LINES = 500
"""Samples that are kept of a node, however long the run."""


def write(
    folder: Path,
    *,
    nodes: int = 2,
    hours: float = 1.0,
    outcome: Outcome = "failed",
    lines: int = _LINES,
    message: str = "KeyError: 'lr'",
    has_samples: bool = True,
) -> Path:
    """A run of two attempts: the first loses a node, which a spare replaces; ends as ``outcome`` says."""
    folder.mkdir(parents=True, exist_ok=True)
    end, lost = START + hours * 3600, START + hours * 3600 * 0.4
    hosts = [f"gpu{number}" for number in range(1, nodes + 2)]  # The last is the spare.
    (folder / ".ddplaunch-run").write_text("")
    started = {"schema": 1, "run_id": RUN_ID, "run_tag": "x", "script": "train.py", "command": COMMAND}
    started |= {"cwd": "/home/ada/train", "start": iso_time(START), "host": "login1", "pid": 11}
    (folder / "run.json").write_text(json.dumps(started))
    report = _report(hosts, lost, end, outcome, message)
    (folder / "report.json").write_text(json.dumps({"schema": 2, **wire.to_json(report)}))
    _write_lines(folder / "events.jsonl", _events(hosts, lost, end, outcome))
    if has_samples:
        (folder / "samples").mkdir(exist_ok=True)
        ends = {nodes - 1: (START + 60, lost), nodes: (lost + 70, end)}
        for index, host in enumerate(hosts):
            span = ends.get(index, (START + 60, end))
            _write_lines(folder / "samples" / f"node_{index}.jsonl", _samples(index, host, span, lines))
    return folder


def with_logs(folder: Path) -> Path:
    """A run that has failed, with log files of rank 3 and 4, a failure page, and ranks that have lost it."""
    write(folder, lines=5)
    for local_rank in (3, 4):
        logs = folder / "gpu1" / "attempt_1" / str(local_rank)
        logs.mkdir(parents=True)
        (logs / "stdout.log").write_text("x\n")
    report = json.loads((folder / "report.json").read_text())
    for worker in report["attempts"][1]["exits"][4:8]:
        error = {"message": "RuntimeError: Connection closed by peer", "traceback": "Traceback\nRuntimeError"}
        worker.update(returncode=1, stopped=False, error={**error, "time_s": START})
    (folder / "report.json").write_text(json.dumps(report))
    failed = f"{' ddplaunch: the job failed ':=^80}\nrank 3 on gpu1 failed: KeyError: 'lr'\n\n  | Traceback\n\n"
    failed += "then:     ranks 4-7 lost a peer\nlog:      /logs/3/stderr.log\nhint:     Look there.\n"
    (folder / "report.txt").write_text(failed)
    shown = "\x1b[31mepoch 1\x1b[0m\nepoch 2: 10 %\repoch 2: 90 %\n"
    (folder / "console.log").write_text(f"{'an early line' * 9_000}\n{shown}{failed}")
    return folder


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def _exits(hosts: list[str], end: float, length: float, code: int) -> tuple[WorkerExit, ...]:
    """Of eight workers on each host."""
    return tuple(
        WorkerExit(node * 8 + local, local, host, 1000 + node * 8 + local, code, code == -15, end, length)
        for node, host in enumerate(hosts)
        for local in range(8)
    )


def _report(hosts: list[str], lost: float, end: float, outcome: Outcome, message: str) -> RunResult:
    first, second = lost - START - 45, end - lost - 60
    last = _exits([*hosts[:-2], hosts[-1]], end, second, 0 if outcome == "succeeded" else -15)
    failure = None
    if outcome == "failed":
        frames = (("41, in <module>", "main()"), ("33, in main", 'rate = config["lr"]'))
        shown = "".join(f'  File "/home/ada/train/train.py", line {at}\n    {code}\n' for at, code in frames)
        trace = f"Traceback (most recent call last):\n{shown}{message}\n"
        failure = replace(
            last[3],
            returncode=1,
            stopped=False,
            time_s=end - 2,
            duration_s=second - 2,
            error=WorkerError(message, trace, end - 2),
            tail=tuple(f"[rank3]: {line}" for line in trace.splitlines()),
            log_file="/logs/attempt_1/3/stderr.log",
        )
        last = (*last[:3], failure, *last[4:])
    why = f"{hosts[-2]} has not answered for 5 s"
    exits = _exits(hosts[:-2], lost, first, -15)
    decision = "not restarted: 1 of 1 restarts used" if outcome == "failed" else ""
    late = RankLateness(3, hosts[0], 9000, 800, 640, 0.012, 0.05, 0.034, "rank 3 on gpu1 is late: its GPU is throttled")
    hot = HealthFinding(
        host=hosts[0],
        time_s=lost,
        rule="thermal-slowdown",
        text="GPU 3 is throttled because of its temperature",
        action="check the cooling",
        gpu=3,
        ranks=(3,),
    )
    return RunResult(
        RUN_ID,
        0 if outcome == "succeeded" else 1,
        outcome,
        end - START,
        (
            AttemptResult(0, "failed", exits, first, attempt_follows=True, reason=why),
            AttemptResult(1, outcome, last, second, decision=decision),
        ),
        failure,
        start=iso_time(START),
        end=iso_time(end),
        versions=Versions("0.2.0", "3.12.3", "2.9.0", "5f0c2ab"),
        hosts=tuple(NodeOfRun(host, 8, 96, ("NVIDIA H100 80GB HBM3",) * 8) for host in hosts),
        collectives=(late, RankLateness(5, hosts[0], 9000, 800, 40, 0.002, 0.01, 0.002)),
        health=(hot,),
    )


def _events(hosts: list[str], lost: float, end: float, outcome: Outcome) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"schema": 1, "t": START, "event": "run_started", "text": "job"}]

    def add(t: float, event: str, node: int | None = None, **facts: object) -> None:
        where = {} if node is None else {"node": node, "host": hosts[node]}
        found.append({"t": t, "event": event, **where, **facts})

    def start(attempt: int, t: float, nodes: list[int]) -> None:
        for place, node in enumerate(nodes):
            facts = {"workers": 8, "first_rank": place * 8, "world_size": len(nodes) * 8, "import_s": 21.0}
            add(t, "attempt_started", node, attempt=attempt, **facts)
        add(t + 2, "first_output", attempt=attempt, host=hosts[0], rank=0)

    spare, gone = len(hosts) - 1, len(hosts) - 2
    last, tenth = [*range(gone), spare], (lost - START) * 0.1
    quiet = START + tenth * 5
    for node in range(spare):
        add(START + 3, "agent_ready", node, workers=8)
    start(0, START + 45, [*range(spare)])
    add(quiet, "quiet", attempt=0)
    add(quiet + tenth, "active", attempt=0, s=5.0)
    add(quiet + tenth / 2, "hang_reported", text="nothing has moved for 5 min: the job seems to hang")
    add(quiet + tenth, "moves_again", text="the job moves again, after 10 min")
    hot = {"gpu": 3, "rule": "thermal-slowdown", "severity": "warn"}
    add(lost, "health", 0, **hot, text="GPU 3 is throttled because of its temperature")
    add(lost + 1, "node_lost", gone, text=f"{hosts[gone]} has not answered for 5 s")
    add(lost + 1, "message", level=0, text=f"{hosts[spare]} replaces {hosts[gone]}")
    for node in range(gone):
        add(lost + 2, "attempt_ended", node, attempt=0, outcome="stopped")
    add(lost + 2, "restart", text="the workers start again")
    add(lost + 30, "node_joined", spare, workers=8)
    start(1, lost + 60, last)
    if outcome == "failed":
        text = "rank 3 on gpu1 failed: KeyError: 'lr' (train.py:33)"
        add(end - 2, "worker_failed", 0, attempt=1, rank=3, text=text)
    for node in last:
        add(end - 1, "attempt_ended", node, attempt=1, outcome=outcome)
    add(end, "run_ended", outcome=outcome, exit_code=0 if outcome == "succeeded" else 1)
    return found


def _samples(index: int, host: str, span: tuple[float, float], lines: int) -> Iterable[dict[str, Any]]:
    """Of node 0, GPU 3 is slow and hot, and in the second half its clocks are lowered."""
    chance, step = random.Random(index), (span[1] - span[0]) / lines
    gpus = [{"index": local, "uuid": f"GPU-{index}-{local}", "name": "NVIDIA H100"} for local in range(8)]
    yield {"schema": 1, "node": index, "host": host, "cpus": 96, "memory": 1 << 40, "gpus": gpus}
    yield {"attempt": 0, "t": span[0], "ranks": [*range(index * 8, index * 8 + 8)], "gpu": [*range(8)]}
    is_slow = [index == 0 and local == 3 for local in range(8)]

    def some(least: float, spread: float, digits: int | None = None) -> list[float]:
        return [round(least + chance.random() * spread, digits) for _ in range(8)]

    for number in range(lines):
        wave = 2 * math.sin(number / 17)
        slowed = [(0.35 if slow else 1, 0.6 if slow else 1, 24 if slow else 0) for slow in is_slow]
        reason = "thermal slowdown (hardware)" if number > lines / 2 else None
        yield {
            "t": round(span[0] + step * (number + 1), 3),
            "s": round(step, 3),
            "n": {
                "cpu": round(30 + wave + chance.random() * 4, 1),
                "mem": int(2.1e11 + number * 1e7),
                "disk": 41.5,
                "rx": int(2.4e9 + chance.random() * 1e8),
                "tx": int(2.3e9 + chance.random() * 1e8),
            },
            "w": {
                "cpu": some(89, 18, 1),
                "rss": some(1.4e10 + number * 1e6, 1e8),
                "rd": some(0, 2e7),
                "wr": some(0, 2e5),
                "quiet": some(0, 9, 1),
                "lines": some(0.2, 0.1, 3),
            },
            "g": {
                "util": [round(each * slow, 1) for each, (slow, _, _) in zip(some(91 + wave, 6), slowed, strict=True)],
                "mem": some(6.8e10, 1e8),
                "power": [each * less for each, (_, less, _) in zip(some(600 + wave * 9, 40), slowed, strict=True)],
                "temp": [each + more for each, (_, _, more) in zip(some(61 + wave, 4), slowed, strict=True)],
                "throttle": [reason if slow else None for slow in is_slow],
            },
        }
