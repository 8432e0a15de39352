"""A run is stopped before its scheduler would end it, so that it saves its state and goes on later: --stop-before-end.

The launcher asks the scheduler when the job ends (``SchedulerRow.ends``). Where each node has a launcher, the one that
watches the job decides for all. Must not import torch.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import OptionError, StartNotice

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

EVENTS = {"time_limit": "with `--stop-before-end`: when the job ends, `end_t`; again if its limit was changed"}
EVENT_KEYS = {"end_t": "when the job ends, in seconds since 1970"}

_SIGNALS = ("TERM", "USR1", "USR2")
_MAX_S = 86400.0


def rows() -> tuple[object, ...]:
    """``--stop-before-end`` and ``--time-limit``."""
    from ddplaunch.rows import Condition, Option, parse_positive_seconds

    return (
        Option(
            "--stop-before-end",
            "[SIGNAL@]TIME",
            "Stop the run this long before the scheduler ends the job: the workers get SIGNAL (TERM, USR1 or USR2), "
            "and can save. Exit code 90, and a requeue with --requeue-on. Default: do not; TERM.",
            sets="stop_before_end",
            parse=_parse,
            heading="Restarts and stopping",
        ),
        Option(
            "--time-limit",
            "TIME",
            "With --stop-before-end: the job ends so long after its start, if no scheduler says when.",
            sets="time_limit_s",
            parse=parse_positive_seconds,
            only=(Condition("with --stop-before-end", lambda config: config.stop_before_end),),
            heading="Restarts and stopping",
        ),
    )


def _parse(text: str, option: str) -> tuple[str, float]:
    """Name of the signal, and seconds before the end: ``5m``, or as in sbatch's ``--signal`` ``USR1@300``.

    Raises:
        OptionError: another signal, or no such time.
    """
    from ddplaunch.rows import parse_positive_seconds

    word, _, time_text = text.rpartition("@")
    name = word.strip().upper().removeprefix("SIG") or "TERM"
    if name not in _SIGNALS or text.startswith("@"):
        raise OptionError(option, text, f"the signal before @ must be {', '.join(_SIGNALS[:-1])} or {_SIGNALS[-1]}")
    before_s = parse_positive_seconds(time_text, option)
    if before_s > _MAX_S:
        raise OptionError(option, text, "must be at most a day")
    return f"SIG{name}", before_s


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """Before the run: ``config`` with the time at which the job ends, and a warning if nobody says it.

    Raises:
        OptionError: no scheduler knows the job, and there is no --time-limit; or there is no time left to run.
    """
    from ddplaunch.features.schedulers.table import job_ends
    from ddplaunch.text import duration

    now, (name, before_s) = time.time(), config.stop_before_end or ("", 0.0)
    given = f"{before_s:g}s" if name == "SIGTERM" else f"{name.removeprefix('SIG')}@{before_s:g}s"
    found = job_ends(os.environ, anew=False)
    if not found and config.time_limit_s is None:
        hint = "Give --time-limit, or start the job in SLURM, LSF or PBS."
        raise OptionError("--stop-before-end", given, "no scheduler says when this job ends", hint)
    known = [end for end in found if end is not None]
    ends = known if config.time_limit_s is None else [*known, now + config.time_limit_s]
    left_s = min(ends, default=math.inf) - now
    if left_s <= before_s:
        problem = f"the time limit is {duration(left_s)} away" if left_s > 0 else "the time limit has passed"
        hint = "Give the job more time (sbatch --time), or a shorter time here."
        raise OptionError("--stop-before-end", given, problem, hint)
    if not ends:
        text = "--stop-before-end: the scheduler does not say when this job ends; --time-limit can say it"
        config = replace(config, notices=(*config.notices, StartNotice("warning", text)))
    return replace(config, job_ends_s=min(known, default=None))
