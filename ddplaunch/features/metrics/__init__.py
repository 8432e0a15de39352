"""The metrics of a run as a file in Prometheus' text format, ``--metrics-file``.

Written by the launcher every 10 s. Must not import torch.
"""


def rows() -> tuple[object, ...]:
    """``--metrics-file``."""
    from ddplaunch.rows import Option

    return (
        Option(
            "--metrics-file",
            "FILE",
            "Write what workers, GPUs and nodes do into FILE every 10 s, in Prometheus' text format. Default: none.",
            completes="file",
            sets="output.metrics_file",
            after="--timestamps",
        ),
    )
