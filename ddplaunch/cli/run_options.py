"""Options about runs that go on or have ended: to leave one, to come back to it, to look at it, to end it."""

from __future__ import annotations

from ddplaunch.cli import values
from ddplaunch.rows import Option, flag

LEAVING_AND_COMING_BACK = (
    flag(
        "--detach",
        "Start the run, print its run id and return; the run goes on without this terminal and shell.",
        short="start it and leave; --attach RUN_ID comes back",
        feature="come_back",
    ),
    Option(
        "--leave",
        "RUN_ID",
        "Make a run in the foreground, as after Ctrl-Z, independent of its terminal, which can then be closed.",
        completes="ddplaunch.cli.completion:runs",
        feature="come_back",
    ),
    Option(
        "--attach",
        "RUN_ID",
        "Show the last lines of a run, and what follows; Ctrl-C leaves it. RUN_ID may be a beginning, or last.",
        completes="ddplaunch.cli.completion:runs",
        feature="come_back",
    ),
    Option(
        "--logs",
        "RUN_ID",
        "Print the log files of a run's ranks.",
        completes="ddplaunch.cli.completion:runs",
        feature="come_back",
    ),
    Option(
        "--ranks",
        "3,7",
        "With --logs: of these ranks. Default: all. Of a run, --ranks-filter chooses the ranks on the console.",
        of="--logs",
        parse=values.parse_ranks,
    ),
    Option(
        "--attempt", "N", "With --logs: of attempt N. Default: the last one.", of="--logs", parse=values.parse_whole
    ),
    flag("-f --follow", "With --logs: also print what follows, until the run ends.", of="--logs"),
    Option(
        "--wait",
        "RUN_ID",
        "Wait for the end of a run and exit with its exit code.",
        completes="ddplaunch.cli.completion:runs",
        feature="come_back",
    ),
)

EXISTING_RUNS = (
    Option(
        "--ps",
        "[RUN_ID]",
        "List runs that have processes, their scripts, and whether their launcher is alive. With RUN_ID: a table of "
        "the run's ranks, which follows them on a terminal.",
        can_be_bare=True,
        short="list runs; with RUN_ID: what its ranks use",
        completes="ddplaunch.cli.completion:runs",
        feature="ps",
    ),
    flag(
        "--all",
        "With --ps: list the past runs of this machine from their run folders, the newest first.",
        of="--ps",
        feature="come_back",
    ),
    flag(
        "--nodes",
        "With --ps: list the nodes in which earlier runs have found faults. (--nnodes is the number of nodes.)",
        of="--ps",
        feature="health",
    ),
    Option(
        "--forget",
        "HOSTS|all",
        "Forget the faults that earlier runs have found in these hosts, as after a repair.",
        feature="health",
    ),
    Option(
        "--stacks",
        "RUN_ID",
        "Show what the workers of a run do now: who waits for whom, and at which line.",
        short="show where the workers of a run are",
        completes="ddplaunch.cli.completion:run_ids",
        feature="hangs",
    ),
    Option(
        "--page",
        "RUN_ID",
        "Make run.html, the page of a run on this machine, and print its path.",
        completes="ddplaunch.cli.completion:runs",
        feature="page",
    ),
    Option(
        "--serve",
        "[PORT]",
        "Show the pages of your runs on 127.0.0.1, at this port or at any free one, until Ctrl-C.",
        can_be_bare=True,
        parse=values.parse_port,
        feature="page",
    ),
    Option(
        "--kill",
        "RUN_ID",
        "End all processes of a run: SIGTERM, then SIGKILL after --shutdown-timeout.",
        completes="ddplaunch.cli.completion:killable",
        feature="ps",
    ),
)
