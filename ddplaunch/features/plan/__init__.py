"""``--plan``: what a command would start, and which of its settings are probably wrong.

Runs in the process that the user started. Starts no worker; it may read the script and look at this machine.
"""


def rows() -> tuple[object, ...]:
    """``--plan``."""
    from ddplaunch.rows import Command, flag

    return (
        flag(
            "--plan",
            "Show the plan of the run: nodes, ranks, GPUs, environment; start nothing.",
            short="show what would be started; start nothing",
            heading="Dry run",
        ),
        flag("--json", "With --plan: print JSON, for machines.", of="--plan"),
        Command("--plan", run="ddplaunch.features.plan.plan:show", takes_script=True),
    )
