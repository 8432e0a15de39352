"""Failures and warnings for the user: LaunchError, StartNotice, and the exit codes of ddplaunch (80-90, 93)."""

from __future__ import annotations

import enum
from typing import Literal

from ddplaunch.late_dataclass import dataclass

USAGE = 2
INTERNAL = 80
CHECK_WARNED = 81
NODE_NOT_READY = 82
RENDEZVOUS = 83
NODE_LOST = 84
NEEDS_GPU = 85
PROCESSES_LEFT = 86
HUNG = 87
HARDWARE = 88
NO_REPORT = 89
"""Of --attach and --wait: the run's launcher was killed, so that nobody knows the run's exit code."""

TIME_IS_UP = 90
"""The run was stopped before the end of its job, and is to go on in another one."""

GAVE_UP = 93
"""The script wants no restart; of a worker and of the run. NVIDIA's resiliency extension has the same code."""


class Level(enum.IntEnum):
    """Level of a message: the lowest ``OutputConfig.verbosity`` that shows it."""

    ALWAYS = -1
    """Also with --quiet."""
    NORMAL = 0
    VERBOSE = 1


class LaunchError(Exception):
    """A run that could not be started or continued, as one sentence and one hint.

    Attributes:
        message: the event, with its host and rank.
        hint: a remedy for the user; may be empty.
        exit_code: the documented exit code (docs/exit-codes.md).
        is_shown: the failure page has shown it.
    """

    is_shown = False

    def __init__(self, message: str, hint: str = "", exit_code: int = NODE_NOT_READY) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        """What a traceback shows: the hint too, for whoever has called ``launch``."""
        return with_hint(self.message, self.hint)

    @property
    def text(self) -> str:
        """The error as the command prints it."""
        return error_text(self.message, self.hint)


def error_text(message: str, hint: str) -> str:
    """An error with its hint, which may be empty, as the command prints it."""
    return f"error: {with_hint(message, hint)}"


def with_hint(message: str, hint: str) -> str:
    """``message``, and its hint, which may be empty, on a line of its own."""
    return message + (f"\n  hint: {hint}" if hint else "")


class JobFailed(LaunchError):
    """A job that did not succeed, raised by ``RunResult.check`` only; ``exit_code`` is the job's."""


class UsageError(LaunchError):
    """An invalid option or combination of options; exit code 2.

    Attributes:
        options: long names of the options that cause the error; the command line names the variables that set them.
    """

    def __init__(self, message: str, hint: str = "", options: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint, USAGE)
        self.options = options


class OptionError(UsageError):
    """An invalid value of one option, as ``--nnodes 0: must be above 0``."""

    def __init__(self, option: str, value: object, problem: str, hint: str = "") -> None:
        super().__init__(f"{option} {value}: {problem}", hint, (option,))


@dataclass(frozen=True)
class StartNotice:
    """A message about the configuration, shown when the run starts.

    Attributes:
        kind: ``detail`` and ``unused``, an option without effect, are shown with --verbose only; the others unless
            --quiet. --plan lists the warnings and what is unused.
    """

    kind: Literal["detail", "info", "warning", "unused"]
    text: str

    @property
    def min_verbosity(self) -> Level:
        """Lowest ``OutputConfig.verbosity`` that shows the notice."""
        return Level.VERBOSE if self.kind in ("detail", "unused") else Level.NORMAL

    def __str__(self) -> str:
        return f"warning: {self.text}" if self.kind == "warning" else self.text
