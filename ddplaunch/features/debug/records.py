"""A rank that stops in a debugger gets the user's terminal: words of worker and agent, records of agent and launcher.

A worker connects to the agent's socket for workers. It sends ``SessionRequest`` as a line, and later single bytes; the
agent answers with one byte, and the terminal as a descriptor.
No behaviour belongs here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, Limit, OneLine, Pid, between
from ddplaunch.protocol.launcher_agent import OfRanks

GIVEN, REFUSED = b"t", b"n"
"""Agent to worker: the terminal, with its descriptor, and the value of TERM up to the end of the line; or there is
none, and the reason up to the end of the line."""

GOES_ON, QUITS, RUNS, STOPS = b"c", b"q", b"r", b"s"
"""Worker to agent: the session ends; it ends because the user quits; code of the script runs within it; it has stopped
again."""

PIECE_BYTES = 4096
MAX_PIECES = 8
"""Pieces of output that the agent sends before the launcher has shown them (``SessionOrder``)."""

MAX_LINE_BYTES = 4096

Encoded = Annotated[str, Limit("at most 8 kB of base64", lambda text: len(text) <= 8192 and text.isascii())]
_Cells = Annotated[int, between(0, 10_000)]


@dataclass(frozen=True)
class SessionRequest:
    """Worker to agent: this process stops in a debugger.

    Attributes:
        worker: pid of the worker; the process itself may be a child of it.
        place: where, as in ``at breakpoint() (train.py:7)``, or the exception of a post-mortem.
    """

    worker: Pid
    place: OneLine
    is_post_mortem: bool = False


# Agent to launcher.


@dataclass(frozen=True)
class SessionOpened(OfRanks):
    """Agent to launcher: ``rank`` has stopped in a debugger and waits for the terminal.

    Attributes:
        session: number of the session on this node.
        place: that of ``SessionRequest``.
    """

    session: Count
    attempt: Count
    rank: Count
    host: OneLine
    place: OneLine
    is_post_mortem: bool = False

    @property
    def named_ranks(self) -> list[int]:
        """As ``OfRanks.named_ranks``."""
        return [self.rank]


@dataclass(frozen=True)
class SessionOutput:
    """Agent to launcher: what the debugger shows."""

    session: Count
    data: Encoded


@dataclass(frozen=True)
class SessionChanged:
    """Agent to launcher: what the rank does now in its session, or how that has ended.

    Attributes:
        state: ``running``, for longer than a moment; ``stopped`` again; ``over``: it goes on without the terminal, or
            has ended; or the user has ``quit``.
    """

    session: Count
    state: Literal["running", "stopped", "over", "quit"]


# Launcher to agent.


@dataclass(frozen=True)
class GiveTerminal:
    """Launcher to agent: the session gets a terminal with this TERM and size. Also later, when its size changes."""

    session: Count
    term: OneLine
    rows: _Cells
    columns: _Cells


@dataclass(frozen=True)
class RefuseTerminal:
    """Launcher to agent: there is no terminal, for this ``reason``."""

    session: Count
    reason: OneLine


@dataclass(frozen=True)
class TypeKeys:
    """Launcher to agent: the user has typed this."""

    session: Count
    data: Encoded


@dataclass(frozen=True)
class SessionOrder:
    """Launcher to agent: what a session may do, or must.

    Attributes:
        order: ``send``: one piece of output is shown; another may follow. ``leave``, in answer to the end of the
            session: all that the debugger has shown is on the terminal; or for a session that is open: the run is
            stopped, and a debugger would ignore its SIGINT.
    """

    session: Count
    order: Literal["send", "leave"]


TO_AGENT = (GiveTerminal, RefuseTerminal, TypeKeys, SessionOrder)
FROM_AGENT = (SessionOpened, SessionOutput, SessionChanged)
