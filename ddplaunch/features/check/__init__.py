"""``--check``: whether the nodes of a command are ready for a job.

Runs in the process that the user started. Starts agents and short test processes on the nodes, and no worker.
"""


def rows() -> tuple[object, ...]:
    """``--check``."""
    from ddplaunch.rows import Command, flag

    return (
        flag(
            "--check",
            "Test this machine, or --hosts: versions, GPUs, health, limits, network speed; run no script.",
            short="test this machine or the hosts; run no script",
            heading="Before a run",
        ),
        flag(
            "--deep",
            "With --check: measure each GPU (matrix product, memory, transfers to the others) and name the slow ones.",
            of="--check",
        ),
        Command("--check", run="ddplaunch.features.check.check:check", takes_script=True),
    )
