"""hang.txt and hang.json: what was found when the job stood still, for people and for programs.

Runs in the launcher. A full disk prevents the files, and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.rank_state import is_busy
from ddplaunch.protocol import wire
from ddplaunch.system.files import kept_files
from ddplaunch.text import escape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddplaunch.features.hangs.explanation import Explanation
    from ddplaunch.features.hangs.records import NodeEvidence, RankEvidence

SCHEMA = 1
"""Version of the fields of hang.json."""

_MAX_FILES = 100


def write(
    folder: Path, attempt: int, ranks: Sequence[RankEvidence], nodes: Sequence[NodeEvidence], found: Explanation
) -> Path | None:
    """Write both files to the run's ``folder``; a later hang gets hang_2.txt, and so on.

    Returns the path of the text; None if the disk did not take it, or if there are ``_MAX_FILES`` already.
    """
    names = ("hang", *(f"hang_{number}" for number in range(2, _MAX_FILES + 1)))
    stem = next((name for name in names if not os.path.lexists(folder / f"{name}.txt")), None)
    if stem is None:
        return None
    facts = {
        "schema": SCHEMA,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "attempt": attempt,
        **wire.to_json(found),
    }
    text = folder / f"{stem}.txt"
    with kept_files.noting(text):
        kept_files.write_whole(text.with_suffix(".json"), _json(facts, ranks, nodes))
        kept_files.write_whole(text, page(attempt, ranks, nodes, found))
        return text
    return None


def _json(facts: dict[str, object], ranks: Sequence[RankEvidence], nodes: Sequence[NodeEvidence]) -> str:
    """A line for each fact, rank and node. ``indent`` takes five times as long: minutes for thousands of ranks."""
    lines = [f"{json.dumps(name)}: {json.dumps(fact)}" for name, fact in facts.items()]
    for name, evidences in (("ranks", ranks), ("nodes", nodes)):
        each = [json.dumps(wire.to_json(evidence)) for evidence in evidences]
        lines.append(f'"{name}": [\n' + ",\n".join(each) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def page(attempt: int, ranks: Sequence[RankEvidence], nodes: Sequence[NodeEvidence], found: Explanation) -> str:
    """The text of hang.txt: the explanation, each rank with its counters and Python stacks, GPUs and NCCL's RAS."""
    parts = [f"attempt {attempt}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}: {found.job_state.value}", ""]
    parts += [escape(sentence) for sentence in found.sentences]
    for evidence in sorted(ranks, key=lambda each: each.rank):
        parts += ["", *_rank(evidence)]
    for node in nodes:
        parts += ["", *_node(node)]
    return "\n".join(parts) + "\n"


def _rank(evidence: RankEvidence) -> list[str]:
    head = f"rank {evidence.rank} on {evidence.host}, pid {evidence.pid}"
    if not evidence.is_running:
        return [f"{head}: has ended"]
    little = "" if is_busy(evidence) else " (too little to count)"
    facts = [
        f"no output for {evidence.silent_s:.0f} s",
        f"in the last {evidence.window_s:.1f} s {evidence.cpu_s:.2f} s of CPU time and {evidence.io_bytes} bytes read "
        f"and written{little}, {evidence.run_queue_wait_s:.2f} s waiting for a CPU",
    ]
    facts += [evidence.blocked_state] if evidence.blocked_state else []
    facts += [f"busiest child: {evidence.busy_child}"] if evidence.busy_child else []
    facts += ["reads standard input"] if evidence.waits_for_input else []
    lines = [f"{head}: {'; '.join(facts)}", *(f"  not known: {missing}" for missing in evidence.missing_sources)]
    calls = evidence.flight_record.calls[-5:] if evidence.flight_record else ()
    for call in calls:
        done = "done" if call.is_done else "not done"
        lines.append(f"  {call.operation} #{call.number} of group {call.group}, sizes {call.input_sizes}: {done}")
    return [escape(line) for line in (*lines, *evidence.stacks.splitlines())]


def _node(node: NodeEvidence) -> list[str]:
    lines = [f"GPUs of {node.host}: {node.gpus_missing}" if node.gpus_missing else f"GPUs of {node.host}:"]
    for gpu in node.gpus:
        lines.append(
            f"  {gpu.index} {gpu.name} {gpu.uuid}: {gpu.utilization} % busy, memory {gpu.memory_utilization} %, "
            f"{gpu.power_w} of {gpu.power_limit_w} W {gpu.error}"
        )
    lines += [f"NCCL's RAS: {node.ras_missing}"] if node.ras_missing else []
    return [escape(line) for line in (*lines, *node.ras.splitlines())]
