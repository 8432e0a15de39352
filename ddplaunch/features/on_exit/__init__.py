"""The user's command at the end of a run, ``--on-exit``.

The launcher runs it. Must not import torch.
"""


def rows() -> tuple[object, ...]:
    """``--on-exit``."""
    from ddplaunch.rows import Option

    return (
        Option(
            "--on-exit",
            "COMMAND",
            "Run this shell command when the run has ended; DDPLAUNCH_OUTCOME and others are in its environment.",
            sets="on_exit",
            heading="Restarts and stopping",
        ),
    )
