"""The one exception a user ever sees from us, and the exit codes that are our own."""

from __future__ import annotations

USAGE = 2
INTERNAL = 80
CHECK_FOUND = 81
NODE_NOT_READY = 82
RENDEZVOUS = 83
NODE_LOST = 84
NEEDS_GPU = 85
LEFT_RUNNING = 86
HUNG = 87


class LaunchError(Exception):
    """A run that could not be started or carried on, told in one sentence and one hint.

    Attributes:
        message: what happened, on which host and rank.
        hint: what the user can do about it; may be empty.
        exit_code: the documented exit code (README, "Exit codes").
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = NODE_NOT_READY) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


class UsageError(LaunchError):
    """An option or a combination of options that cannot be meant; exit code 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, USAGE)
