"""The schedulers and MPI launchers that may have started ddplaunch, by one table, and which of them did.

To add one: a ``SchedulerRow`` in the module ``tables`` of a feature, like ``features/other_schedulers/tables.py``, and
the reader that it names, which is imported if the row's variables are set. The innermost scheduler is used: mpirun
inside a SLURM job takes precedence over SLURM, and a step over its job.

Runs in the launcher, before the configuration is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.errors import UsageError
from ddplaunch.rows import load
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.features.schedulers.info import SchedulerInfo, SchedulerRow

_INNERMOST_FIRST = ("mpi", "step", "job")

TABLE: tuple[SchedulerRow, ...] = tuple(
    sorted(features.items("SCHEDULERS", "tables"), key=lambda row: _INNERMOST_FIRST.index(row.layer))
)
"""The rows of all features. They are tried in this order; the first that applies is used."""

WORDS = ("auto", "none", *dict.fromkeys(row.word for row in TABLE))
"""Values of ``--cluster``."""


def detect(environ: Mapping[str, str], cluster: str = "auto") -> SchedulerInfo | None:
    """The scheduler that started ddplaunch; None without one, or if ``cluster`` is ``none``.

    Args:
        environ: the environment of this process.
        cluster: one of ``WORDS``.

    Raises:
        UsageError: variables are invalid or contradict each other, or those of the selected scheduler are not set.
    """
    if cluster not in WORDS:
        raise UsageError(f"--cluster {quote(cluster)}: must be one of {', '.join(WORDS)}")
    rows = [row for row in TABLE if cluster in ("auto", row.word)]
    present = [row for row in rows if all(map(environ.get, row.variables))]
    for row in present:
        found: SchedulerInfo | None = load(row.reader)(environ)
        if found is not None:
            return found
    if rows and cluster != "auto":
        variables = " or ".join(" and ".join(row.variables) for row in present or rows)
        if present:
            raise UsageError(f"--cluster {cluster}: what belongs to {variables} is not set, or is of another job")
        raise UsageError(f"--cluster {cluster}: it did not start ddplaunch, or {variables} would be set")
    return None


def jobs(environ: Mapping[str, str]) -> tuple[SchedulerRow, ...]:
    """A row of each scheduler that has a job of which this process is a part."""
    return tuple(row for row in TABLE if row.job and environ.get(row.job[0]))


def job_ends(environ: Mapping[str, str], *, anew: bool) -> tuple[float | None, ...]:
    """When each job ends of which this process is a part, as ``SchedulerRow.ends``; empty if no scheduler says it.

    Blocks for up to some seconds. ``anew``: ask, although variables say what held when the job was started.
    """
    return tuple(load(row.ends)(environ, anew=anew) for row in jobs(environ) if row.ends)
