"""Options to leave a run and to come back to it."""

from __future__ import annotations

from ddplaunch.cli.parser import Option, flag

DETACH_OPTIONS = (
    flag(
        "--detach",
        "Start the run, print its run id and return; the run goes on without this terminal and shell.",
        pet=False,
    ),
    Option(
        "--leave",
        "RUN_ID",
        "Make a run in the foreground, as after Ctrl-Z, independent of its terminal, which can then be closed.",
        pet=False,
    ),
    Option(
        "--attach",
        "RUN_ID",
        "Show the last lines of a run, and what follows; Ctrl-C leaves it. RUN_ID may be a beginning, or last.",
        pet=False,
    ),
    Option("--logs", "RUN_ID", "Print the log files of a run's ranks.", pet=False),
    Option("--ranks", "3,7", "With --logs: of these ranks. Default: all.", pet=False),
    Option("--attempt", "N", "With --logs: of attempt N. Default: the last one.", pet=False),
    flag("-f --follow", "With --logs: also print what follows, until the run ends.", pet=False),
    Option("--wait", "RUN_ID", "Wait for the end of a run and exit with its exit code.", pet=False),
)
