"""``--collect-logs``: at the end of a run, the log files of other machines are copied to the launcher's run folder.

In the same way comes what the functions of workers have returned.
"""


def rows() -> tuple[object, ...]:
    """``--collect-logs``."""
    from ddplaunch.rows import LOGS, flag

    return (
        flag(
            "--collect-logs",
            "At the end copy the log files of all nodes to this machine. Default: the last lines of failed workers.",
            sets="output.collect_logs",
            only=(LOGS,),
            after="--timestamps",
        ),
    )
