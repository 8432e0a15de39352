"""When a job of LSF or PBS ends: asks their commands, as ``SchedulerRow.ends`` wants it.

Runs in the launcher, before a run and in a thread. Neither scheduler sets a variable with the end of a job. Formats:
the command reference of LSF 10.1 (``bjobs -o``); ``qstat -f`` of OpenPBS (``stime``) and Torque
(``start_time``, ``Walltime.Remaining``).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping

from ddplaunch.features.schedulers import command

_ANSWER_S = 5.0


def lsf(environ: Mapping[str, str], *, anew: bool) -> float | None:
    """The end of the job by its run limit, to the minute; an estimate of the user's (``bsub -We``) is no limit."""
    index = environ.get("LSB_JOBINDEX", "0")
    job = f"{environ['LSB_JOBID']}[{index}]" if index not in ("", "0") else environ["LSB_JOBID"]
    told = _answer("bjobs", "-noheader", "-o", "time_left", job)
    left = re.fullmatch(r"\s*([0-9]{1,6}):([0-9]{2})(?::([0-9]{2}))? L\s*", told)
    return time.time() + _seconds_of(left) if left else None


def pbs(environ: Mapping[str, str], *, anew: bool) -> float | None:
    """The end of the job by its walltime; a suspended job ends later."""
    found = dict(re.findall(r"(?m)^\s*([\w.]+) = (.*?)\s*$", _answer("qstat", "-f", environ["PBS_JOBID"])))
    if re.fullmatch(r"[0-9]{1,9}", found.get("Walltime.Remaining", "")):
        return time.time() + float(found["Walltime.Remaining"])
    limit = re.fullmatch(r"([0-9]{1,6}):([0-9]{2}):([0-9]{2})", found.get("Resource_List.walltime", ""))
    with contextlib.suppress(ValueError, OverflowError):
        started = found.get("stime") or found.get("start_time", "")
        started_s = time.mktime(time.strptime(started, "%a %b %d %H:%M:%S %Y"))
        return started_s + _seconds_of(limit) if limit else None
    return None


def _seconds_of(match: re.Match[str]) -> float:
    hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return 3600.0 * hours + 60.0 * minutes + seconds


def _answer(*words: str) -> str:
    """What the command prints; empty if it fails, or does not end in time."""
    code, told = command.run(_ANSWER_S, *words, environ={"LC_ALL": "C"})
    return "" if code else told
