"""``--ps``: chooses what it shows. Runs in the process that the user started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request


def ps(request: Request) -> None:
    """The user's runs; with --gpus the GPUs, and the runs of all users on them. Raises as what it calls."""
    if request.options["gpus"] is None:
        from ddplaunch.features.ps.ps import ps as show
    else:
        from ddplaunch.features.ps.gpu_table import show
    show(request)
