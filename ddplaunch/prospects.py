"""Whether another attempt may help. Pure; asked where that is decided: by a lone node's agent, or the coordinator."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ddplaunch import verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.model import WorkerError, WorkerExit

IN_A_ROW = 3
"""So many attempts with the same end are taken to be a sign that the next will end likewise."""

_SOON_S = 300.0
"""A job that has run for longer may well have saved what it did."""

_UNPARSED = re.compile(r"(SyntaxError|IndentationError|TabError)\b")

_OWN = re.compile(
    r"(Assertion|Attribute|Import|Index|Key|ModuleNotFound|Name|NotImplemented|Recursion|Runtime|Type|UnboundLocal|Value"
    r"|ZeroDivision)Error"
)
"""What a program raises by its own mistake. OSError and its kin are none of these: a disk or a server may come back."""

_MAY_PASS = re.compile(
    r"cuda|nccl|\bhip|miopen|cudnn|cublas|gloo|\bucc\b|device|gpu|memory|thread|connect|network|socket|peer|store"
    r"|rendezvous|timed? ?out|temporar|unavailable|errno|no space|too many open",
    re.IGNORECASE,
)
"""What a RuntimeError says of a device, the network or a machine that is short of something."""

_KIND = re.compile(r"^([\w.]+)(?::|$)", re.MULTILINE)


def why_hopeless(causes: Sequence[WorkerExit | None]) -> str:
    """Why a restart cannot help, as a sentence; empty if it may.

    ``causes`` are the first failures of the attempts so far, in their order; None where no worker's failure ended one.
    Only the last ``IN_A_ROW`` count.
    """
    last = causes[-1] if causes else None
    if last and last.error and _cannot_be_parsed(last.error):
        return "not restarted: the script cannot be parsed"
    recent = causes[-IN_A_ROW:]
    mistakes = {_mistake(cause) for cause in recent}
    if len(recent) < IN_A_ROW or len(mistakes) > 1 or None in mistakes:
        return ""
    longest_s = math.ceil(max(cause.duration_s for cause in recent if cause) * 10) / 10
    return (
        f"not restarted again: {IN_A_ROW} attempts in a row ended by the same exception at the same place, "
        f"each within {longest_s:.1f} s of its start"
    )


def _cannot_be_parsed(error: WorkerError) -> bool:
    # With frames above it, it may be a text that the script evaluates, or a module that is just being written.
    return bool(_UNPARSED.match(error.message)) and not error.traceback.startswith("Traceback")


def _mistake(cause: WorkerExit | None) -> tuple[str, str] | None:
    """What was raised and where, if it came soon and neither it nor what led to it is of a kind that may pass."""
    error = cause.error if cause else None
    if cause is None or error is None or cause.duration_s > _SOON_S or verdict.is_consequence(cause):
        return None
    # What was raised begins a line of its own; frames, source lines and most of what is below a message are indented.
    kinds = set(_KIND.findall(error.traceback))
    said = "\n".join((error.message, *re.findall(r"^\S.*", error.traceback, re.MULTILINE)))
    if not kinds or not all(map(_OWN.fullmatch, kinds)) or ("RuntimeError" in kinds and _MAY_PASS.search(said)):
        return None
    return error.message, error.traceback
