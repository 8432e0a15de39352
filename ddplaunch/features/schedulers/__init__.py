"""``--cluster``: what has started ddplaunch names the nodes, or this node's rank and the endpoint.

Runs in the launcher, before the configuration is built. ``table`` has the schedulers that features bring, and finds the
one; its reader makes an ``info``, by which ``scheduler`` completes the user's options; ``checks`` finds mistakes.
"""

from __future__ import annotations


def rows() -> tuple[object, ...]:
    """``--cluster``."""
    from ddplaunch.features.schedulers.table import WORDS
    from ddplaunch.rows import Option

    return (
        Option(
            "--cluster",
            "WORD",
            "Scheduler whose variables name the nodes, or this node's rank and the endpoint: "
            f"{', '.join(WORDS[:-1])} or {WORDS[-1]}. Default: auto.",
            "auto",
            completes=WORDS,
            after="--nnodes",
        ),
    )
