"""Queries of ``--env`` to an agent without a run, and its answers. No behaviour.

The command asks for an environment (MakeEnvironment), sends the parts of files that the answer says are missing
(PutFilePart), and asks again until there are none. While uv works, the agent says what it does (EnvironmentProgress).
For ``--env pack`` it asks what is at the path of the launcher's environment (LookForEnvironment); the copy travels as
one of ``--sync`` does (``features.snapshot.queries``).
"""

from __future__ import annotations

from typing import Annotated

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import FolderName, Limit, LongText, OneLine, Seconds, Size, at_most

MARKER = ".ddplaunch-environment.json"
"""File in an environment that is complete; its time is that of the last use."""

NAME = "environments"
"""Of the feature: an agent that is to run with the launcher's environment has a text of this name."""

PART_BYTES = 512 << 10
ROUND_BYTES = 8 << 20
"""At most so many bytes are asked for at once: no more are in memory on the way to a host."""

MAX_PACKAGES = 10_000

Hash = Annotated[str, Limit("a hash", lambda text: len(text) == 64 and set(text) <= set("0123456789abcdef"))]
"""SHA-256 in hexadecimal digits."""

_Path = Annotated[str, Limit("an absolute path", lambda text: not text or text.startswith("/"))]


@dataclass(frozen=True)
class OfferedFile:
    """A file of the launcher's machine that a host can get; ``nbytes`` is its size."""

    hash: Hash
    nbytes: Size


@dataclass(frozen=True, kw_only=True)
class MakeEnvironment:
    """Command to agent: requests an EnvironmentAnswer.

    Attributes:
        name: begin of the folder's name, for people.
        main: the file that names the packages, one of ``files``; ``uv.lock`` beside a pyproject.toml is that of a
            project.
        files: their texts, by relative path.
        python: as uv's ``--python``.
        args: further arguments for uv.
        variables: settings of uv, of the launcher's environment.
        settings: the user's uv.toml on the launcher's machine, for a host without one.
        digest: hash of all that determines the environment besides this machine.
        folder: where environments are kept; empty: the default.
        needs_torch: an environment without torch is of no use.
        uv: the uv of the launcher's machine; None: it has none.
        machine: type of the processor for which that is.
        wheels: by name, files to install from, and from nothing else.
    """

    name: FolderName
    main: str
    files: dict[str, str]
    python: str
    args: tuple[str, ...] = ()
    variables: dict[str, str]
    settings: str = ""
    digest: Hash
    folder: str = ""
    needs_torch: bool = True
    uv: OfferedFile | None = None
    machine: str = ""
    wheels: dict[str, OfferedFile]


@dataclass(frozen=True)
class PutFilePart:
    """Command to agent: bytes of the file with this hash, from ``offset`` on; the file has ``size``.

    ``data``: these bytes, up to ``PART_BYTES`` of them, in base64.
    """

    hash: Hash
    offset: Size
    size: Size
    data: str


@dataclass(frozen=True)
class WantedFile:
    """Up to ``ROUND_BYTES`` from ``offset`` on are missing of the file with this hash."""

    hash: Hash
    offset: Size


@dataclass(frozen=True)
class EnvironmentProgress:
    """Agent to command, while it makes an environment, at least every few seconds: what uv has said last."""

    text: OneLine


@dataclass(frozen=True, kw_only=True)
class EnvironmentAnswer:
    """Agent to command, in answer to MakeEnvironment: the environment, what is missing for it, or why there is none.

    Attributes:
        python: path of its interpreter.
        made_s: seconds that it took to make it; 0: it was there.
        packages: its packages, as ``torch 2.13.0``, in order.
        wanted: what must be sent before it can be made.
        problem: why there is none, with the last lines of uv.
        hint: what to do about it.
    """

    python: _Path = ""
    made_s: Seconds = 0.0
    packages: Annotated[tuple[OneLine, ...], at_most(MAX_PACKAGES)] = ()
    wanted: Annotated[tuple[WantedFile, ...], at_most(1)] = ()
    problem: LongText = ""
    hint: OneLine = ""


@dataclass(frozen=True, kw_only=True)
class LookForEnvironment:
    """Command to agent: requests an EnvironmentFound about the folder that is to be as the launcher's.

    Attributes:
        folder: its path.
        python: its interpreter.
        identity: that of ``python`` on the launcher's machine.
        signature: that of the folder there; empty: it is not compared.
        left_out: what does not belong to it, relative to it.
        base: the interpreter with which it was made; empty: it is complete by itself.
        base_folder: the folder of that.
    """

    folder: str
    python: str
    identity: OneLine
    signature: str = ""
    left_out: tuple[str, ...] = ()
    base: str = ""
    base_folder: str = ""


@dataclass(frozen=True, kw_only=True)
class EnvironmentFound:
    """Agent to command, in answer to LookForEnvironment.

    Attributes:
        is_same: the folder is that of the launcher's machine, or equal to it.
        is_other: something else is there, which we have not put there.
        machine: type of this machine's processor.
        libc: name and version of its libc.
        base: version of the interpreter ``base``; empty: there is none that runs.
        python: version of the interpreter ``python``; empty: it does not run.
        problem: why it does not.
    """

    is_same: bool
    is_other: bool
    machine: OneLine
    libc: OneLine
    base: OneLine
    python: OneLine
    problem: OneLine = ""


TO_AGENT = {MakeEnvironment: "make", PutFilePart: "make", LookForEnvironment: "look"}
FROM_AGENT = (EnvironmentProgress, EnvironmentAnswer, EnvironmentFound)
