"""The restart policy: whether a restart after a failure is allowed and can help, and on which nodes. Pure."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.results import NEVER_RESTARTED, WorkerExit
from ddplaunch.text import plural, quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddplaunch.protocol.results import WorkerError

MAX_IDENTICAL_FAILURES = 3
"""After this many attempts in a row with one exception, the next attempt is expected to raise it too."""

_EARLY_S = 300.0
"""Seconds. A restart of a job that ran for longer makes progress if the job has saved a checkpoint."""

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


@dataclass
class Restarts:
    """The restarts of a run.

    Attributes:
        limit: ``--max-restarts``.
        count: number of restarts so far.
        causes: the first failures of the last rounds, in their order; None for one that no worker's failure ended. A
            coordinator on another node, after the rendezvous has moved, gets the count and not the causes: it needs
            ``MAX_IDENTICAL_FAILURES`` rounds of its own before it calls them identical.
    """

    limit: int
    count: int = 0
    causes: tuple[WorkerExit | None, ...] = ()

    def note(self, cause: WorkerExit | None) -> None:
        """A round has ended by ``cause``."""
        self.causes = (*self.causes, cause)[-MAX_IDENTICAL_FAILURES:]

    @property
    def why_none(self) -> str:
        """Why no restart follows the last round; empty if one may."""
        if self.count >= self.limit:
            return f"not restarted: {self.limit} of {self.limit} restarts used" if self.limit else NEVER_RESTARTED
        return reason_not_to_restart(self.causes)


def reason_not_to_restart(causes: Sequence[WorkerExit | None]) -> str:
    """Why another attempt cannot help, for the user; empty if it may help. ``causes`` as in ``Restarts``."""
    last = causes[-1] if causes else None
    if last and last.give_up:
        return f"not restarted: rank {last.rank} on {last.host} gave up: {quote(last.give_up, 1000)}"
    if last and last.error and _cannot_be_parsed(last.error):
        return "not restarted: the script cannot be parsed"
    errors = {_programming_error(cause) for cause in causes}
    if len(causes) < MAX_IDENTICAL_FAILURES or len(errors) > 1 or None in errors:
        return ""
    longest_s = math.ceil(max(cause.duration_s for cause in causes if cause) * 10) / 10
    return (
        f"not restarted again: {MAX_IDENTICAL_FAILURES} attempts in a row ended by the same exception "
        f"at the same place, each within {longest_s:.1f} s of its start"
    )


def why_not_used_again(exits: Iterable[WorkerExit]) -> str:
    """Why the node of these workers must not be used for another attempt, with its host; empty if it may be used.

    ``exits`` are the workers of one node. A fault of the hardware says more than a wish of the script.
    """
    all_exits = list(exits)
    if broken := next((exit_ for exit_ in all_exits if exit_.hardware), None):
        return f"{broken.host} is not used again: {broken.hardware}"
    if asked := next((exit_ for exit_ in all_exits if exit_.avoid_node), None):
        return f"{asked.host} is not used again: rank {asked.rank} asks for it: {asked.avoid_node}"
    return ""


def too_few_nodes(remaining: int, needed: int, leaving: str = "", *, ends_rendezvous: bool = False) -> str:
    """Why no attempt follows without the nodes that are lost or leave; empty if enough nodes remain.

    Args:
        remaining: number of nodes that the next attempt could have, spares included.
        needed: the smallest number that the user allows.
        leaving: ``why_not_used_again`` of a node; empty if none leaves.
        ends_rendezvous: that node serves the rendezvous, and no launcher moves it.
    """
    if remaining >= needed:
        return f"not restarted: {leaving}, and this node serves the rendezvous" if ends_rendezvous else ""
    are_left = f"{plural(remaining, 'other node')} {'is' if remaining == 1 else 'are'} left, and {needed} are needed"
    reasons = [leaving, are_left if remaining else "there is no other node"]
    return f"not restarted: {'; '.join(filter(None, reasons))}"


def _cannot_be_parsed(error: WorkerError) -> bool:
    # With frames above it, the error may be in a text that the script evaluates, or in a module being written.
    return bool(_SYNTAX_ERROR.match(error.message)) and not error.traceback.startswith("Traceback")


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
