"""A small feature, as a template: how old the last checkpoint of a job is, ``--checkpoint FILE``.

``tests/process/test_added_feature.py`` adds it to the package. Agents look at the file and report its age; the launcher
notes an event if it is old, and says it on the failure page.
"""

EVENTS = {"old_checkpoint": "the checkpoint that a node sees is old"}
EVENT_KEYS = {"age_s": "age of a checkpoint in seconds"}


def rows() -> tuple[object, ...]:
    """``--checkpoint``."""
    from ddplaunch.rows import Option

    return (
        Option(
            "--checkpoint",
            "FILE",
            "Say how old this file is when the job fails.",
            sets="checkpoint",
            heading="Restarts and stopping",
        ),
    )
