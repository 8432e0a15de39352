"""Records of a run's control socket: requests of this user's other processes to a launcher, and its answers.

The launcher serves the unix socket ``control.sock`` in the run folder. A client sends one request, one line as ``wire``
encodes it, and gets one answer. No behaviour belongs here.
"""

from __future__ import annotations

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import wire
from ddplaunch.protocol.field_types import OneLine

SOCKET = "control.sock"
"""Name of the socket in the run folder."""

MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 4 << 20

ANSWER_S = 45.0
"""Seconds from a request to its answer, at most: a feature may ask all nodes, and another request may be before it."""


class Request(wire.Nested):
    """Base of the requests. ``run_tag``: the run that the client means; a process may be the launcher of several."""

    run_tag: str
    direction = "TO_LAUNCHER"


class Answer(wire.Nested):
    """Base of the answers to requests of features."""

    direction = "FROM_LAUNCHER"


@dataclass(frozen=True)
class StopRun(Request):
    """Client to launcher: stop the run, as SIGTERM does; answered by RequestGranted or RequestRefused."""

    run_tag: OneLine


@dataclass(frozen=True)
class LeaveTerminal(Request):
    """Client to launcher: use the terminal no more; answered by RequestGranted or RequestRefused."""

    run_tag: OneLine


@dataclass(frozen=True)
class RequestGranted:
    """Launcher to client: the workers are being stopped, or the terminal can be closed."""


@dataclass(frozen=True)
class RequestRefused:
    """Launcher to client: why there is no other answer."""

    reason: OneLine


TO_LAUNCHER = (StopRun, LeaveTerminal)
FROM_LAUNCHER = (RequestGranted, RequestRefused)
"""Besides those of features, ``features.records("TO_LAUNCHER")`` and ``features.records("FROM_LAUNCHER")``."""
