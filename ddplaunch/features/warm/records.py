"""Records of a keeper: how a run leaves one (KeeperSpec), and how the next run takes its agent and forkserver from it.

They are exchanged over the keeper's unix socket, one request for each connection. No behaviour belongs here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import OneLine, Pid, ReturnCode, between

KeptSeconds = Annotated[float, between(0, 7 * 86400)]
"""How long a keeper waits for the next run."""

MAX_REQUEST_BYTES = 4 << 20
"""An environment may have 2 MiB."""

ANSWER_S = 1.0
"""Seconds for which a run waits for a keeper's answer before it starts its own agent."""


CONSENT = b"1"
"""What a run sends to its new agent, over the same connection, in answer to TakenOver: only then the agent begins."""


@dataclass(frozen=True, kw_only=True)
class KeeperSpec:
    """What a run leaves: the launcher to each agent, and that to a new keeper, on its stdin.

    Attributes:
        seconds: how long the keeper waits for a run.
        watched: processes with whose end it ends: the leader of the session, and those of schedulers' jobs, which
            the agent adds.
        preload: the modules of --preload.
        script: path of the script whose needs of torch are imported too; empty for none.
    """

    seconds: KeptSeconds
    watched: tuple[Pid, ...] = ()
    preload: tuple[str, ...] = ()
    script: str = ""


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """What a run wants to find; sent by a new keeper to the one that has the socket: would such a run take it over?

    Answered by KeeperAnswer. If it fits, it stays, for the seconds of the Inquiry; if it differs, it ends.

    Attributes:
        surroundings: what the agent would inherit, by name, as ``features.warm.surroundings`` reads it.
        env: the environment of the agent.
        preload: the modules of --preload.
        script: path of the run's script; empty if it runs none.
        seconds: how long the keeper waits for the next run; None: until the time that it had before.
    """

    surroundings: dict[str, str]
    env: dict[str, str]
    preload: tuple[str, ...]
    script: str
    seconds: KeptSeconds | None = None


@dataclass(frozen=True, kw_only=True)
class Takeover(Inquiry):
    """A run to a keeper: fork an agent with a forkserver. Answered by TakenOver, or if it does not fit by KeeperAnswer.

    The record carries descriptors: the agent's stdin, stdout and stderr, its working directory, and those that it
    inherits, which get the numbers from ``FIRST_INHERITED`` on.

    Attributes:
        umask: of the agent.
        argv: the agent's command line in ps.
        alarm_s: seconds until SIGALRM ends an agent that has received no record; 0: no limit.
    """

    umask: Annotated[int, between(0, 0o777)]
    argv: tuple[str, ...]
    alarm_s: Annotated[int, between(0, 86400)] = 0


FIRST_INHERITED = 3
"""Number of the first inherited descriptor in an agent that a keeper has forked."""

TAKEOVER_FDS = 4
"""Descriptors of a Takeover before the inherited ones."""

MAX_INHERITED = 3


@dataclass(frozen=True)
class TakenOver:
    """Keeper, in answer to Takeover: ``pid`` is the agent; the record carries its pidfd. AgentGone follows."""

    pid: Annotated[int, between(2, 1 << 22)]


@dataclass(frozen=True)
class AgentGone:
    """Keeper, after TakenOver: the agent has ended. ``returncode`` as in ``subprocess``."""

    returncode: ReturnCode


@dataclass(frozen=True)
class KeeperAnswer:
    """Keeper: whether a run can take it over: it ``fits``, it is ``used`` by a run, or it ``differs``; and why not."""

    state: Literal["fits", "used", "differs"]
    reason: OneLine = ""


TO_KEEPER = (Takeover, Inquiry)
FROM_KEEPER = (TakenOver, KeeperAnswer)
