"""Runs SLURM's ``scontrol``, before, during and after a run, and reads what it prints.

Source of the format: SLURM's source code and what 22.05 prints.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping

from ddplaunch.errors import UsageError
from ddplaunch.features.schedulers import command
from ddplaunch.features.slurm.reader import parse_node_list, read_job
from ddplaunch.text import quote

SOON_S = 900.0
"""A maintenance that begins within so many seconds is about to begin."""

_LEAVING = {
    "DOWN": "SLURM has set it down",
    "DRAIN": "SLURM drains it",
    "DRAINED": "SLURM drains it",
    "DRAINING": "SLURM drains it",
    "FAIL": "SLURM has marked it as failing",
    "FAILING": "SLURM has marked it as failing",
}
"""State flags of a node that gets no further jobs."""

_MAX_REASON = 200
_ANSWER_S = 5.0


def run(timeout_s: float, *arguments: str, seconds: bool = False) -> tuple[int, str]:
    """As ``command.run``. ``seconds``: times are printed in seconds since the epoch."""
    return command.run(timeout_s, "scontrol", *arguments, environ={"SLURM_TIME_FORMAT": "%s"} if seconds else None)


def job_end(environ: Mapping[str, str], *, anew: bool) -> float | None:
    """When the job of this process ends, as ``SchedulerRow.ends``.

    SLURM sets the variable since 23.02, for each job and step, and never changes it; scontrol knows a limit that was
    changed. Source: SLURM's source code, ``env.c``, and its changelog.
    """
    told, job = _seconds(environ.get("SLURM_JOB_END_TIME", "")), read_job(environ, is_first=True)
    if job is None or (told is not None and not anew):
        return told
    code, output = run(_ANSWER_S, "show", "job", "--oneliner", job.id, seconds=True)
    if code or field(output, "JobState") == "":
        return None
    return math.inf if field(output, "TimeLimit") == "UNLIMITED" else _seconds(field(output, "EndTime"))


def leaving(nodes: str, reservations: str, now_s: float, own_reservation: str = "") -> dict[str, str]:
    """Names of the nodes that SLURM takes out of service, each with the reason, a sentence without the name.

    Args:
        nodes: what ``scontrol show node --oneliner`` has printed.
        reservations: what ``scontrol show reservation --oneliner`` has printed, with times in seconds.
        now_s: wall clock, in seconds since the epoch.
        own_reservation: the reservation in which the job runs.
    """
    found = dict(_maintained(reservations, now_s, own_reservation))
    for line in nodes.splitlines():
        name = field(line, "NodeName")
        flags = re.findall(r"[A-Z_]+", field(line, "State").upper())
        why = next((_LEAVING[flag] for flag in flags if flag in _LEAVING), "")
        if name and why:
            found[name] = why + _reason(line)
    return found


def _reason(line: str) -> str:
    match = re.search(r"(?<!\S)Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*$", line)
    return f": {quote(match[1], _MAX_REASON)}" if match and match[1] else ""


def _maintained(reservations: str, now_s: float, own: str) -> Iterator[tuple[str, str]]:
    for line in reservations.splitlines():
        name, flags = field(line, "ReservationName"), field(line, "Flags").split(",")
        start, end = (_seconds(field(line, key)) for key in ("StartTime", "EndTime"))
        if name and name != own and "MAINT" in flags and start is not None and start - now_s < SOON_S:
            if end is not None and end <= now_s:
                continue
            begins = "has begun" if start <= now_s else f"begins at {time.strftime('%H:%M', time.localtime(start))}"
            for node in _names(field(line, "Nodes")):
                yield node, f"its maintenance {begins} (reservation {quote(name)})"


def _names(text: str) -> tuple[str, ...]:
    try:
        return parse_node_list(text)
    except UsageError:  # "(null)", or a list that this version does not know.
        return ()


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def field(line: str, name: str) -> str:
    """The value of ``NAME=VALUE``; empty without it."""
    match = re.search(rf"(?<!\S){name}=(\S*)", line)
    return match[1] if match else ""
