"""The runs that have processes on this and other hosts, their GPUs, and their end: ``--ps`` and ``--kill``.

The commands run in the process that the user started; ``run_finder`` and ``gpu_finder`` run in an agent without a run.
Must not import torch.
"""


def rows() -> tuple[object, ...]:
    """``--ps``, ``--kill``."""
    from ddplaunch.rows import EXISTING_RUNS, Command, Option

    return (
        Option(
            "--ps",
            "[RUN_ID]",
            "List runs that have processes, their scripts, and whether their launcher is alive. With RUN_ID: a table "
            "of the run's ranks, which follows them on a terminal. With --gpus: who uses the GPUs, and who waits.",
            can_be_bare=True,
            short="list runs; with RUN_ID: what its ranks use",
            completes="ddplaunch.features.runs.completion:runs",
            heading=EXISTING_RUNS,
        ),
        Option(
            "--kill",
            "RUN_ID",
            "End all processes of a run: SIGTERM, then SIGKILL after --shutdown-timeout.",
            completes="ddplaunch.features.runs.completion:killable",
            heading=EXISTING_RUNS,
        ),
        Command("--ps", run="ddplaunch.features.ps.command:ps", takes_hosts=True, takes=("gpus",)),
        Command("--kill", run="ddplaunch.features.ps.ps:kill", takes_hosts=True),
    )
