"""Run folders are not kept for ever, ``--keep-runs``: each run deletes old ones in the default folder.

The launcher does it and, for a node's logs, the agent. Must not import torch.
"""


def rows() -> tuple[object, ...]:
    """``--keep-runs``."""
    from ddplaunch.rows import Option, parse_count

    return (
        Option(
            "--keep-runs",
            "N",
            "Run folders to keep, the newest N; those in --log-dir are never deleted. Default: 30 days, at most 5 GB.",
            sets="output.keep_runs",
            parse=parse_count,
            after="--log-dir",
        ),
    )
