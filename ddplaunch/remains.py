"""What ``--ps`` and ``--kill`` and the agents that they start on each machine say to each other; records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["launcher", "agent", "forkserver", "store", "member", "worker", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class ListRuns:
    """In place of an AgentSpec: tell what is there of this user's runs, by RunsFound, and wait for EndRun."""


@dataclass(frozen=True)
class EndRun:
    """End all runs of this id, or the one with this mark: SIGTERM, SIGKILL after ``grace_s``. Answer: AgentEnded."""

    run_id: str
    grace_s: float


@dataclass(frozen=True, kw_only=True)
class RunHere:
    """What a machine has of one run.

    Attributes:
        mark: the run's, without the number of a node.
        counts: how many processes of each kind, in pairs.
        age_s: of the oldest process.
        memory_bytes: what they would free; pages they share count once.
        is_led: its launcher is there, or is connected to an agent that is there.
    """

    mark: str
    counts: tuple[tuple[Kind, int], ...]
    age_s: float
    memory_bytes: int
    is_led: bool


@dataclass(frozen=True)
class RunsFound:
    """Answer to ListRuns.

    Attributes:
        machine: the same for two names of one machine (or container), and for no other.
        hidden: pids of processes of this user that may not be looked at.
    """

    machine: str
    runs: tuple[RunHere, ...]
    hidden: tuple[int, ...] = ()
