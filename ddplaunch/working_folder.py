"""The working directory, which somebody may have deleted."""

from __future__ import annotations

import os

from ddplaunch.errors import NODE_NOT_READY, LaunchError


def working_folder() -> str:
    """Its path.

    Raises:
        LaunchError: it is not there any more.
    """
    try:
        return os.getcwd()
    except OSError as error:
        hint = "Somebody has deleted it, maybe to make it anew: `cd` there once more."
        raise LaunchError(f"the working directory: {error.strerror}", hint, NODE_NOT_READY) from None
