"""Whether a restart of a run is left, and can help: by the last failures, and by what the rounds have saved.

Pure. ``verdicts.decide`` asks it. What the job would go on from is a text that a feature gives (``Part.saved``), and is
only compared here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddplaunch.protocol import first_failure
from ddplaunch.protocol.results import NO_RESTARTS_ALLOWED, WorkerExit
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.protocol.rendezvous import NodeReady
    from ddplaunch.protocol.results import WorkerError

MAX_IDENTICAL_FAILURES = 3
"""After this many attempts in a row with one exception, the next attempt is expected to raise it too."""

_EARLY_S = 300.0
"""Seconds. A restart of a job that ran for longer makes progress if the job has saved a checkpoint."""

_SUSPECT_AFTER = 2

_SYNTAX_ERROR = re.compile(r"(SyntaxError|IndentationError|TabError)\b")

_PROGRAMMING_ERROR = re.compile(
    r"(Assertion|Attribute|Import|Index|Key|ModuleNotFound|Name|NotImplemented|Recursion|Runtime|Type|UnboundLocal|Value"
    r"|ZeroDivision)Error"
)
"""Exceptions of programming errors. OSError and its subclasses are not among them: a disk or a server may come back."""

_TRANSIENT = re.compile(
    r"cuda|nccl|\bhip|miopen|cudnn|cublas|gloo|\bucc\b|device|gpu|memory|thread|connect|network|socket|peer|store"
    r"|rendezvous|timed? ?out|temporar|unavailable|errno|no space|too many open",
    re.IGNORECASE,
)
"""Words of a RuntimeError about a device, the network or a lack of resources, which may be temporary."""

_EXCEPTION_NAME = re.compile(r"^([\w.]+)(?::|$)", re.MULTILINE)

_NOTHING_SAVED = (
    f"not restarted again: {MAX_IDENTICAL_FAILURES} attempts in a row ended by the same failure, and none of them has "
    "saved a newer checkpoint"
)


class Restarts:
    """The restarts of a run.

    Attributes:
        max_restarts: how many are allowed.
        restart_count: number of restarts so far.
        causes: the first failures of the last rounds, in their order; None for one that no worker's failure ended. The
            coordinator of a new rendezvous gets the count and not the causes: it needs ``MAX_IDENTICAL_FAILURES``
            rounds of its own before it calls them identical.
        saved: what the next round begins from, a text that differs for each saved state; empty: nothing was saved;
            None: no feature knows it.
        began_from: what the last rounds have begun from, in the order of ``causes``.
        has_saved: whether these rounds have saved anything newer; None: that is not known.
    """

    def __init__(self, max_restarts: int, restart_count: int = 0) -> None:
        self.max_restarts, self.restart_count = max_restarts, restart_count
        self.causes: tuple[WorkerExit | None, ...] = ()
        self.saved: str | None = None
        self.began_from: tuple[str | None, ...] = ()
        self.has_saved: tuple[bool | None, ...] = ()

    def on_forming(self, attempt: int, first: NodeReady) -> None:
        """Round ``attempt`` is formed: what its first node has found counts, unless it has looked before another round.

        A spare may have looked long ago; and the first node may have changed what the job would go on from.
        """
        if first.saved is not None and first.attempt >= attempt:
            self.saved = first.saved

    def note(self, cause: WorkerExit | None, saved: str | None = None) -> None:
        """A round has ended by ``cause``; the job would now go on from ``saved``."""
        has_saved = None if saved is None or self.saved is None else saved != self.saved
        self.causes = (*self.causes, cause)[-MAX_IDENTICAL_FAILURES:]
        self.began_from = (*self.began_from, self.saved)[-MAX_IDENTICAL_FAILURES:]
        self.has_saved = (*self.has_saved, has_saved)[-MAX_IDENTICAL_FAILURES:]
        self.saved = self.saved if saved is None else saved

    @property
    def why_no_restart(self) -> str:
        """Why no restart follows the last round; empty if one may."""
        if self.restart_count < self.max_restarts:
            return why_restart_cannot_help(self.causes, self.has_saved)
        used = f"not restarted: {self.max_restarts} of {self.max_restarts} restarts used"
        return used if self.max_restarts else NO_RESTARTS_ALLOWED

    @property
    def saved_is_suspect(self) -> bool:
        """Whether the last two rounds have failed soon after they began from one state, and have saved nothing."""
        began, causes = self.began_from[-_SUSPECT_AFTER:], self.causes[-_SUSPECT_AFTER:]
        failed = [cause for cause in causes if cause and cause.duration_s <= _EARLY_S and not cause.give_up]
        is_same = len(began) == _SUSPECT_AFTER and len(set(began)) == 1 and bool(began[0])
        return is_same and len(failed) == _SUSPECT_AFTER and not any(self.has_saved[-_SUSPECT_AFTER:])


def why_restart_cannot_help(causes: Sequence[WorkerExit | None], has_saved: Sequence[bool | None] = ()) -> str:
    """Why another attempt cannot help, for the user; empty if it may help. The arguments are as in ``Restarts``."""
    last = causes[-1] if causes else None
    if last and last.give_up:
        return f"not restarted: rank {last.rank} on {last.host} gave up: {quote(last.give_up, 1000)}"
    if last and last.error and _cannot_be_parsed(last.error):
        return "not restarted: the script cannot be parsed"
    if len(causes) < MAX_IDENTICAL_FAILURES or any(has_saved):
        return ""
    if has_saved and None not in has_saved:
        failures = {_failure(cause) for cause in causes}
        return _NOTHING_SAVED if len(failures) == 1 and None not in failures else ""
    errors = {_programming_error(cause) for cause in causes}
    if len(errors) > 1 or None in errors:
        return ""
    longest_s = math.ceil(max(cause.duration_s for cause in causes if cause) * 10) / 10
    return (
        f"not restarted again: {MAX_IDENTICAL_FAILURES} attempts in a row ended by the same exception "
        f"at the same place, each within {longest_s:.1f} s of its start"
    )


def _cannot_be_parsed(error: WorkerError) -> bool:
    # With frames above it, the error may be in a text that the script evaluates, or in a module being written.
    return bool(_SYNTAX_ERROR.match(error.message)) and not error.traceback.startswith("Traceback")


def _failure(cause: WorkerExit | None) -> tuple[str, int] | None:
    """What a failure looks like, whichever rank it is of and whatever numbers it names; None: not of a worker."""
    if cause is None or first_failure.is_consequence(cause):
        return None
    message = re.sub(r"0x[0-9a-f]+|[0-9]+", "#", cause.error.message.partition("\n")[0]) if cause.error else ""
    return message, 0 if cause.error else cause.returncode


def _programming_error(cause: WorkerExit | None) -> tuple[str, str] | None:
    """Message and traceback of a programming error soon after the start; None if the cause may be temporary."""
    error = cause.error if cause else None
    if cause is None or error is None or cause.duration_s > _EARLY_S or first_failure.is_consequence(cause):
        return None
    # Exceptions begin a line; frames, source lines and most other text of a traceback are indented.
    kinds = set(_EXCEPTION_NAME.findall(error.traceback))
    text = "\n".join((error.message, *re.findall(r"^\S.*", error.traceback, re.MULTILINE)))
    if (
        not kinds
        or not all(map(_PROGRAMMING_ERROR.fullmatch, kinds))
        or ("RuntimeError" in kinds and _TRANSIENT.search(text))
    ):
        return None
    return error.message, error.traceback
