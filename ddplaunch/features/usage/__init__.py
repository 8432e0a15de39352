"""The usage samples: what workers, GPUs and nodes use while a job runs, every 2 s, and the live table of a run.

The agents take the samples, the launcher writes them to the run folder. Must not import torch.
"""


def rows() -> tuple[object, ...]:
    """``--no-samples``, ``--ps RUN_ID``."""
    from ddplaunch.rows import Command, flag

    return (
        flag(
            "--no-samples",
            "Do not read every 2 s what workers, GPUs and nodes use. Default: read it, into samples/ of the run.",
            sets="output.samples",
            gives=False,
            after="--timestamps",
        ),
        Command("--ps", run="ddplaunch.features.usage.live:live", needs_value=True),
    )


class UsageRecord:
    """Base of the records of usage samples; ``records`` is not loaded before the first one."""
