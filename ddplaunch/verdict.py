"""Who failed first, and what follows from it. Pure; used by the agent (restart?) and the launcher (page, exit code)."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.model import WorkerExit

_SAYS_PEER_IS_GONE = re.compile(
    r"Connection (reset|closed|refused) by peer|connectFullMesh|Connection refused|Broken pipe|Socket closed"
    r"|remote process exited|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|recvBytes|sendBytes"
    r"|Timed out waiting \d+ms for (recv|send)|DistNetworkError|DistStoreError|store .* is down",
    re.IGNORECASE,
)
"""What gloo, NCCL and TCPStore say in a rank whose *peer* died. The dying rank's sockets close before its exit can be
seen, so such an error may well be dated before the failure that caused it."""

KILLED_FOR_MEMORY = {
    "yes": "killed by the kernel for memory (out of memory)",
    "perhaps": "perhaps by the kernel for memory: it killed something on this machine meanwhile",
}
"""What a SIGKILL is called, by ``WorkerExit.out_of_memory``."""


def failures(exits: Iterable[WorkerExit]) -> list[WorkerExit]:
    """Workers that failed by themselves, the likely cause first: own troubles before lost peers, then by time."""
    return sorted((e for e in exits if _failed(e)), key=lambda e: (is_consequence(e), e.time_s, e.rank))


def first_failure(exits: Iterable[WorkerExit]) -> WorkerExit | None:
    """The worker that explains the end of an attempt; None if no worker failed by itself."""
    return next(iter(failures(exits)), None)


def _failed(exit_: WorkerExit) -> bool:
    return not exit_.stopped and exit_.returncode != 0


def is_consequence(exit_: WorkerExit) -> bool:
    return exit_.error is not None and bool(_SAYS_PEER_IS_GONE.search(exit_.error.message))


def exit_code(returncode: int) -> int:
    """A returncode as a shell shows it: 128 + n for signal n."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """``exit code 7`` or ``SIGKILL``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
