"""Records of a keeper: how a run leaves one (KeeperSpec), and how the next run takes its agent and forkserver from it.

They are exchanged over the keeper's unix socket, one request for each connection. No behaviour belongs here.
"""

from __future__ import annotations

from dataclasses import field
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
"""What a run sends to its new agent, over the same connection, when it knows of it: only then the agent begins."""


@dataclass(frozen=True, kw_only=True)
class KeeperSpec:
    """What a run leaves: the launcher to each agent, and that to a new keeper, on its stdin.

    Attributes:
        seconds: how long the keeper waits for a run.
        watched: processes with whose end it ends: the leader of the session, and those of schedulers' jobs, which
            the agent adds.
        preload: the modules of --preload.
        script: path of the script whose needs of torch are imported too; empty for none.
        environ: the agent's environment, as ``surroundings.digests``.
        environ_fd: descriptor that the keeper inherits: ``surroundings.environ_file`` with that environment. The
            keeper's own has only what ``surroundings.visible`` names.
    """

    seconds: KeptSeconds
    watched: tuple[Pid, ...] = ()
    preload: tuple[str, ...] = ()
    script: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    environ_fd: Annotated[int, between(0, 1 << 20)] = 0


@dataclass(frozen=True, kw_only=True)
class KeeperRequest:
    """What a run wants to find, to a keeper: fork an agent with a forkserver, or only say whether it could.

    A new keeper sends it to the one that has the socket, which stays if it fits, for ``seconds``, and ends if it
    differs. The record of a run carries descriptors: the agent's stdin, stdout and stderr, its working directory, a
    file with its environment (``surroundings.environ_file``), which only the agent reads, and those that it inherits,
    which get the numbers from ``FIRST_INHERITED`` on. Answered by KeeperAnswer.

    Attributes:
        surroundings: what the agent would inherit, by name, as ``features.warm.surroundings`` reads it.
        env: the environment of the agent, as ``surroundings.digests``.
        preload: the modules of --preload.
        script: path of the run's script; empty if it runs none.
        seconds: how long the keeper waits for the next run; None: until the time that it had before.
        argv: the agent's command line in ps; empty: no agent is wanted.
        umask: of the agent.
        alarm_s: seconds until SIGALRM ends an agent that has received no record; 0: no limit.
    """

    surroundings: dict[str, str]
    env: dict[str, str]
    preload: tuple[str, ...]
    script: str
    seconds: KeptSeconds | None = None
    argv: tuple[str, ...] = ()
    umask: Annotated[int, between(0, 0o777)] = 0o077
    alarm_s: Annotated[int, between(0, 86400)] = 0


FIRST_INHERITED = 3
"""Number of the first inherited descriptor in an agent that a keeper has forked."""

TAKEOVER_FDS = 5
"""Descriptors of a request for an agent before the inherited ones."""

MAX_INHERITED = 3


@dataclass(frozen=True)
class KeeperAnswer:
    """Keeper: whether a run can take it over: it ``fits`` or it ``differs``; and why not.

    To another keeper: ``used`` if it differs and cannot end yet, since a run uses it.

    If an agent was wanted and it fits, ``pid`` is the agent, and the record carries its pidfd. AgentGone follows.
    """

    state: Literal["fits", "used", "differs"]
    reason: OneLine = ""
    pid: Annotated[int, between(0, 1 << 22)] = 0


@dataclass(frozen=True)
class AgentGone:
    """Keeper: the agent has ended. ``returncode`` as in ``subprocess``."""

    returncode: ReturnCode
