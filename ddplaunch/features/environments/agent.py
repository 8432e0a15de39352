"""In an agent whose Python is that of an environment of ``--env``: workers find its programs, and it stays as it is.

Runs in the agent, in its main thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.environments.queries import MARKER, NAME
from ddplaunch.features.snapshot.records import MARKER as MARKER_OF_COPY
from ddplaunch.mailbox import NEVER

if TYPE_CHECKING:
    from ddplaunch.protocol.specs import AgentSpec

_TOUCH_S = 12 * 3600.0


def begin(spec: AgentSpec, _post: Callable[[object], None]) -> None:
    """Set the variables that the environment's own ``activate`` sets: workers inherit them."""
    if _holds_copy() or NAME in spec.texts or os.path.exists(os.path.join(sys.prefix, MARKER)):
        if sys.prefix != sys.base_prefix:
            os.environ["VIRTUAL_ENV"] = sys.prefix
        os.environ["PATH"] = os.pathsep.join((os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)))


def _holds_copy() -> bool:
    """Whether this is a copy of --env pack: then no other command puts another one in its place while the run lasts."""
    try:
        fd = os.open(os.path.join(sys.prefix, MARKER_OF_COPY), os.O_RDONLY | os.O_CLOEXEC)  # Until this process ends.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # Such a lock cannot be had.
        pass
    return True


class EnvironmentPart(Part):
    """Notes that the environment is used, as long as the run goes on."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._marker = os.path.join(sys.prefix, MARKER)
        self._touch_at = time.monotonic() + _TOUCH_S if os.path.exists(self._marker) else NEVER

    def run_due(self, now: float) -> float:
        """The time of the marker is that of the last use."""
        if now >= self._touch_at:
            self._touch_at = now + _TOUCH_S
            with contextlib.suppress(OSError):
                os.utime(self._marker)
        return self._touch_at


part = EnvironmentPart
