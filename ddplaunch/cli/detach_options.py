"""Options to leave a run and to come back to it."""

from __future__ import annotations

from ddplaunch.cli.parser import flag

DETACH_OPTIONS = (
    flag(
        "--detach",
        "Start the run, print its run id and return; the run goes on without this terminal and shell.",
        pet=False,
    ),
)
