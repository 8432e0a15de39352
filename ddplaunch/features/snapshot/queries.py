"""Queries of ``--sync`` to an agent without a run, and its answer. No behaviour.

The command asks for a copy of a snapshot (MakeCopy), sends the parts of files that the answer says are missing
(PutPart), and asks again until there are none. An agent keeps what has arrived: a copy that was cut off goes on there.
Meanwhile it says how far it is (CopyProgress). Of many hosts, those that have their copy give it to others (GiveFiles).
"""

from __future__ import annotations

from typing import Annotated

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import FolderName, Limit, OneLine, Port, Size, at_most, between

MAX_WANTED = 10_000
PART_BYTES = 128 << 10
"""Of a file; over a slow link, each takes a few seconds."""

ROUND_BYTES = 8 << 20
"""At most so many bytes are asked for at once: no more are in memory on the way to a host."""

PROGRESS_S = 3.0
"""Seconds between two CopyProgress."""

RoundBytes = Annotated[int, between(0, ROUND_BYTES)]

Hash = Annotated[str, Limit("a hash", lambda text: len(text) == 64 and set(text) <= set("0123456789abcdef"))]
"""SHA-256 of a file, in hexadecimal digits."""


@dataclass(frozen=True)
class Source:
    """A host that gives its files to others.

    Attributes:
        certificate: with which it answers, as PEM.
        secret: what others must say.
    """

    addresses: tuple[OneLine, ...]
    port: Port
    certificate: str
    secret: str


@dataclass(frozen=True, kw_only=True)
class MakeCopy:
    """Command to agent: requests a CopyAnswer.

    Attributes:
        project: folder of the snapshots of one project.
        name: of the snapshot in it.
        marker: hash of its marker, which says all else.
        marker_bytes: size of the marker.
        cwd: working directory of the workers, relative to the folder of the code.
        round_bytes: so much may the answer ask for.
        sender: user and machine of the command.
        source: what is missing is taken from there first.
        place: absolute path at which the copy is to stand, and nothing else; empty: in the home, for workers.
    """

    project: FolderName
    name: FolderName
    marker: Hash
    marker_bytes: Size
    cwd: str = ""
    round_bytes: RoundBytes = ROUND_BYTES
    sender: OneLine = ""
    source: Source | None = None
    place: str = ""


@dataclass(frozen=True)
class PutPart:
    """Command to agent: bytes of the file with this hash, from ``offset`` on; the file has ``size``.

    ``data``: these bytes, up to ``PART_BYTES`` of them, compressed by zlib, in base64.
    """

    project: FolderName
    hash: Hash
    offset: Size
    size: Size
    data: str


@dataclass(frozen=True, kw_only=True)
class GiveFiles:
    """Command to agent, which has made its copy: let other hosts take its files. Answered by Giving.

    ``identity``: private key and certificate, as PEM. ``secret``: what takers must say.
    """

    project: FolderName
    name: FolderName
    identity: str
    secret: str


@dataclass(frozen=True)
class KeepWaiting:
    """Command to agent, which has made its copy: others have not, and the command lives."""


@dataclass(frozen=True)
class Wanted:
    """Up to ``nbytes`` from ``offset`` on are missing of the file with this hash."""

    hash: Hash
    offset: Size
    nbytes: RoundBytes


@dataclass(frozen=True)
class CopyAnswer:
    """Agent to command, in answer to MakeCopy. ``problem``: why there is no copy; without it and ``wanted`` there is.

    Attributes:
        links: links of the code that lead to nothing on this machine.
        left: so many bytes are missing in all.
        other_sender: whose code the working directory has had before, if it was another user or machine.
    """

    wanted: Annotated[tuple[Wanted, ...], at_most(MAX_WANTED)] = ()
    problem: OneLine = ""
    links: Annotated[tuple[OneLine, ...], at_most(3)] = ()
    left: Size = 0
    other_sender: OneLine = ""


@dataclass(frozen=True)
class CopyProgress:
    """Agent to command, every ``PROGRESS_S`` from the first query on: the host lives, and so far is its copy.

    Attributes:
        left: so many bytes are missing.
        steps: grows with each part of a file, and with each file of the copy.
    """

    left: Size
    steps: Size


@dataclass(frozen=True)
class Giving:
    """Agent to command: other hosts reach it there; it has no address if it cannot listen."""

    addresses: Annotated[tuple[OneLine, ...], at_most(8)] = ()
    port: Port = 0


TO_AGENT = dict.fromkeys((MakeCopy, PutPart, GiveFiles, KeepWaiting), "receive")
FROM_AGENT = (CopyAnswer, CopyProgress, Giving)
