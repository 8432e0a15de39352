"""Records of a run's control socket: requests of this user's other processes to a launcher, and its answers.

The launcher serves the unix socket ``control.sock`` in the run folder. A client sends one request, one line as ``wire``
encodes it, and gets one answer. No behaviour belongs here.
"""

from __future__ import annotations

from typing import Annotated

from ddplaunch.features.hangs.records import EXAMINATION_S
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import OneLine, at_most

SOCKET = "control.sock"
"""Name of the socket in the run folder."""

MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 4 << 20

ANSWER_S = 2 * EXAMINATION_S + 5
"""Seconds from a request to its answer, at most: an examination that goes on ends first."""

MAX_LINES = 1000

_Lines = Annotated[tuple[OneLine, ...], at_most(MAX_LINES)]


@dataclass(frozen=True)
class ExamineRun:
    """Client to launcher: find out what the workers do now; answered by RunExamined or RequestRefused.

    ``run_tag``: the run that the client means; a process may be the launcher of several.
    """

    run_tag: OneLine


@dataclass(frozen=True, kw_only=True)
class RunExamined:
    """Launcher to client, in answer to ExamineRun.

    Attributes:
        sentences: what the job does; who waits for whom.
        lines: what each rank does and where it is, equal ranks together.
        path: hang.txt with all stacks, on the launcher's machine; empty if it could not be written.
        all_nodes_at: where only the launcher's own node was examined: the host whose launcher can examine all nodes.
    """

    sentences: _Lines
    lines: _Lines = ()
    path: OneLine = ""
    all_nodes_at: OneLine = ""


@dataclass(frozen=True)
class StopRun:
    """Client to launcher: stop the run, as SIGTERM does; answered by RunStops or RequestRefused.

    ``run_tag``: as for ExamineRun.
    """

    run_tag: OneLine


@dataclass(frozen=True)
class RunStops:
    """Launcher to client, in answer to StopRun: the workers are being stopped."""


@dataclass(frozen=True)
class LeaveTerminal:
    """Client to launcher: use the terminal no more; answered by TerminalLeft or RequestRefused.

    ``run_tag``: as for ExamineRun.
    """

    run_tag: OneLine


@dataclass(frozen=True)
class TerminalLeft:
    """Launcher to client, in answer to LeaveTerminal: the terminal can be closed."""


@dataclass(frozen=True)
class RequestRefused:
    """Launcher to client: why there is no other answer."""

    reason: OneLine


TO_LAUNCHER = (ExamineRun, StopRun, LeaveTerminal)
FROM_LAUNCHER = (RunExamined, RunStops, TerminalLeft, RequestRefused)
