"""Commands about runs that are in a folder of logs: attach, logs, the live table, the page, the list of past runs.

They run in the process that the user started. They read the files of a run and use its control socket; they change
nothing in a run folder, except for the page of the run.
"""


def rows() -> tuple[object, ...]:
    """``--detach``, ``--leave``, ``--attach``, ``--logs``, ``--wait``, ``--ps --all``."""
    from ddplaunch.rows import COMING_BACK, Command, Option, flag, parse_ranks, parse_whole

    def of_run(name: str, text: str) -> Option:
        return Option(name, "RUN_ID", text, completes="ddplaunch.features.runs.completion:runs", heading=COMING_BACK)

    return (
        flag(
            "--detach",
            "Start the run, print its run id and return; the run goes on without this terminal and shell.",
            short="start it and leave; --attach RUN_ID comes back",
            heading=COMING_BACK,
        ),
        of_run(
            "--leave",
            "Make a run in the foreground, as after Ctrl-Z, independent of its terminal, which can then be closed.",
        ),
        of_run(
            "--attach",
            "Show the last lines of a run, and what follows; Ctrl-C leaves it. RUN_ID may be a beginning, or last.",
        ),
        of_run("--logs", "Print the log files of a run's ranks, also those that are only on other machines."),
        Option(
            "--ranks",
            "3,7",
            "With --logs: of these ranks. Default: all. Of a run, --ranks-filter chooses the ranks on the console.",
            of="--logs",
            parse=parse_ranks,
        ),
        Option("--attempt", "N", "With --logs: of attempt N. Default: the last one.", of="--logs", parse=parse_whole),
        flag("--stdout", "With --logs: only what was written to stdout.", of="--logs"),
        flag("--stderr", "With --logs: only what was written to stderr.", of="--logs"),
        flag("-f --follow", "With --logs: also print what follows, until the run ends.", of="--logs"),
        of_run("--wait", "Wait for the end of a run and exit with its exit code."),
        flag(
            "--all",
            "With --ps: list the past runs of this machine from their run folders, the newest first.",
            of="--ps",
        ),
        Command("--leave", run="ddplaunch.features.come_back.launcher_request:leave"),
        Command("--attach", run="ddplaunch.features.come_back.attach:attach"),
        Command("--logs", run="ddplaunch.features.come_back.logs:logs", takes_hosts=True),
        Command("--wait", run="ddplaunch.features.come_back.attach:wait"),
        Command("--all", run="ddplaunch.features.come_back.past_runs:list_all"),
        Command("--detach", run="ddplaunch.features.come_back.detached:start", takes_script=True, starts_run=True),
    )
