"""The metrics of a run as a file in Prometheus' text format, ``--metrics-file``.

Written by the launcher every 10 s. Must not import torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


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


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """Before the run: raise OptionError if the file cannot be written, as far as that can be known."""
    from ddplaunch.system.files import kept_files

    kept_files.check_can_write("--metrics-file", os.path.abspath(config.output.metrics_file or ""))
    return config
