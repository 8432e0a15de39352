"""The faults of ``--inject``: the table of kinds, the parser, and the sentences that describe a fault.

Used by the command line, --plan and the launcher. Pure: ``launcher`` injects the faults.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from typing import Any, Literal

from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import quote, seconds

FaultKind = Literal["kill", "exit", "hang", "slow", "lose", "partition", "crash agent"]

_MAX_S = 7 * 86400.0
_MAX_FACTOR = 1000.0


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """One fault to inject.

    Attributes:
        rank: the worker that gets the fault; None for a fault of a node.
        node: the node that gets the fault (its GROUP_RANK); None for a fault of a worker.
        attempt: the only attempt in which it happens, from 0.
        after_s: seconds after the start of that attempt; 0 with ``after_line``.
        after_line: the fault happens when ``rank``, or any rank of ``node``, first prints a line that contains this
            text; None for a fault that happens after a time.
        code: exit code of an ``exit``.
        for_s: duration of a ``partition`` in seconds; None: until the end of the run.
        by: factor of a ``slow``.
        text: the option as the user wrote it, shortened to 200 characters.
    """

    kind: FaultKind
    rank: int | None = None
    node: int | None = None
    attempt: int = 0
    after_s: float = 0.0
    after_line: str | None = None
    code: int | None = None
    for_s: float | None = None
    by: float | None = None
    text: str = field(default="", compare=False)


@dataclass(frozen=True)
class _FaultRow:
    """What there is to know about a kind of fault.

    Attributes:
        needs: keys that must be given.
        may_have: keys that may be given, beside those of ``_EVERY_KIND``.
        help: text for the grammar.
        plan: text for --plan; a template over the fields of ``FaultSpec`` and ``duration``.
        effect: text for the report afterwards; a template over the fields of ``plan`` and ``host``.
    """

    needs: tuple[str, ...]
    help: str
    plan: str
    effect: str
    may_have: tuple[str, ...] = ()


_FAULTS: dict[FaultKind, _FaultRow] = {
    "kill": _FaultRow(
        needs=("rank",),
        help="the worker gets SIGKILL",
        plan="kill rank {rank}",
        effect="rank {rank} on {host} got SIGKILL",
    ),
    "exit": _FaultRow(
        needs=("rank",),
        may_have=("code",),
        help="the worker ends with this exit code, or with 1",
        plan="exit rank {rank} with code {code}",
        effect="rank {rank} on {host} ended with exit code {code}",
    ),
    "hang": _FaultRow(
        needs=("rank",),
        help="the worker is suspended (SIGSTOP)",
        plan="hang rank {rank}",
        effect="rank {rank} on {host} was suspended (SIGSTOP)",
    ),
    "slow": _FaultRow(
        needs=("rank", "by"),
        help="the worker runs ten times slower",
        plan="slow rank {rank} by {by:g}x",
        effect="rank {rank} on {host} became {by:g} times slower",
    ),
    "lose": _FaultRow(
        needs=("node",),
        help="all processes of the node are killed at once",
        plan="lose node {node}",
        effect="all processes of {host} were killed at once",
    ),
    "partition": _FaultRow(
        needs=("node",),
        may_have=("for",),
        help="the node is disconnected, for a time or until the end",
        plan="partition node {node} {duration}",
        effect="{host} was disconnected {duration},",
    ),
    "crash agent": _FaultRow(
        needs=("node",),
        help="the node's agent gets SIGKILL",
        plan="crash the agent of node {node}",
        effect="the agent on {host} got SIGKILL",
    ),
}
_EVERY_KIND = ("attempt", "after", "after-line")
_EXAMPLES = {"rank": "R", "node": "N", "code": "C", "by": "10x", "for": "TIME"}


def _grammar() -> Iterator[str]:
    for name, kind in _FAULTS.items():
        needs = [f"{key}={_EXAMPLES[key]}" for key in kind.needs]
        form = " ".join([name, *needs, *(f"[{key}={_EXAMPLES[key]}]" for key in kind.may_have)])
        yield f"{form:<29}{kind.help}"
    yield "all may have [attempt=N], and [after=TIME] or [after-line='TEXT']; a TIME is 5s, 500ms or 2m"


GRAMMAR = "\n".join(_grammar())
"""One line per kind of fault, and one for the keys of all kinds."""


def parse(text: str) -> FaultSpec:
    """Parse one ``--inject``. Words are split, and quotes read, as by a shell.

    Raises:
        UsageError: the text is not a fault; the hint is the whole grammar.
    """
    try:
        kind, words = _kind_of(shlex.split(text))
        return FaultSpec(kind=kind, text=quote(text, 200), **_fields(kind, words))
    except ValueError as error:
        indented = "".join(f"\n    {line}" for line in GRAMMAR.splitlines())
        raise UsageError(f"--inject {quote(repr(text), 200)}: {error}", f"It is one of:{indented}") from None


def _kind_of(words: list[str]) -> tuple[FaultKind, list[str]]:
    """The kind of fault, and the words after it."""
    if words in ([], ["help"]):
        raise ValueError("names no fault")
    for kind in _FAULTS:
        names = kind.split()
        if words[: len(names)] == names:
            return kind, words[len(names) :]
    if words[0] == "crash":
        raise ValueError("only an agent can crash: crash agent node=N")
    raise ValueError(f"there is no fault {quote(words[0])}")


def _fields(kind: FaultKind, words: Iterable[str]) -> dict[str, Any]:
    """The fields of ``FaultSpec`` in ``words``.

    Raises:
        ValueError: a key is missing, or a value is invalid.
    """
    given = dict(_pairs(kind, words))
    missing = [key for key in _FAULTS[kind].needs if key not in given]
    if missing:
        raise ValueError(f"{kind} needs {missing[0]}={_EXAMPLES[missing[0]]}")
    if "after" in given and "after-line" in given:
        raise ValueError("after and after-line cannot be combined")
    if kind == "exit":
        given.setdefault("code", "1")
    return {field: read(given[key], key) for key, (field, read) in _FIELDS.items() if key in given}


def _pairs(kind: FaultKind, words: Iterable[str]) -> Iterator[tuple[str, str]]:
    row = _FAULTS[kind]
    seen: set[str] = set()
    for word in words:
        name, equals, value = word.partition("=")
        key = name.replace("_", "-")
        if not equals:
            raise ValueError(f"{quote(word)} is not NAME=VALUE")
        if key not in (*row.needs, *row.may_have, *_EVERY_KIND):
            raise ValueError(f"{kind} has no {quote(name)}=")
        if key in seen:
            raise ValueError(f"{key}= is given twice")
        seen.add(key)
        yield key, value


def _whole(text: str, key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{key}={quote(text)} must be a whole number, from 0")
    return int(text)


def _code(text: str, key: str) -> int:
    code = _whole(text, key)
    if code > 255:
        raise ValueError(f"{key}={code} must be an exit code, 0 to 255")
    return code


def _seconds(text: str, key: str) -> float:
    found_s = seconds(text)
    if found_s is None:
        raise ValueError(f"{key}={quote(text)} must be a time like 5s, 500ms or 2m")
    if found_s > _MAX_S:
        raise ValueError(f"{key}={text} must be at most {_MAX_S / 86400:g} days")
    return found_s


def _duration(text: str, key: str) -> float:
    found_s = _seconds(text, key)
    if not found_s:
        raise ValueError(f"{key}={text} must be longer than 0")
    return found_s


def _factor(text: str, key: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)x", text)
    if not match or not 1 < float(match[1]) <= _MAX_FACTOR:
        raise ValueError(f"{key}={quote(text)} must be like 10x, more than 1x and at most {_MAX_FACTOR:g}x")
    return float(match[1])


def _line(text: str, key: str) -> str:
    # Every line contains the empty text; no line contains a line end.
    if not text or "\n" in text or "\r" in text:
        raise ValueError(f"{key}={quote(text)} must be text without line breaks")
    return text


_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "rank": ("rank", _whole),
    "node": ("node", _whole),
    "attempt": ("attempt", _whole),
    "after": ("after_s", _seconds),
    "after-line": ("after_line", _line),
    "code": ("code", _code),
    "for": ("for_s", _duration),
    "by": ("by", _factor),
}


def describe(fault: FaultSpec) -> str:
    """The fault and its time, for --plan."""
    return f"{_fill(_FAULTS[fault.kind].plan, fault)}, {_moment(fault)}"


def effect(fault: FaultSpec, host: str) -> str:
    """The effect of the fault on ``host``, for the report afterwards."""
    return _fill(_FAULTS[fault.kind].effect, fault, host)


def _fill(template: str, fault: FaultSpec, host: str = "") -> str:
    duration = "until the end of the run" if fault.for_s is None else f"for {fault.for_s:g} s"
    return template.format(host=host, duration=duration, **vars(fault))


def _target(fault: FaultSpec) -> str:
    return f"node {fault.node}" if fault.rank is None else f"rank {fault.rank}"


def _moment(fault: FaultSpec) -> str:
    if fault.after_line is not None:
        writer = _target(fault) if fault.node is None else f"a rank of {_target(fault)}"
        return f"when {writer} prints {fault.after_line!r} in attempt {fault.attempt}"
    start = f"the start of attempt {fault.attempt}"
    return f"{fault.after_s:g} s after {start}" if fault.after_s else f"at {start}"


def check(injections: Iterable[FaultSpec], world_size: int, nodes: int) -> None:
    """Check that the ranks and nodes exist in the largest world that the run can have.

    Raises:
        UsageError: a rank or a node does not exist.
    """
    for fault in injections:
        target, number, count = ("rank", fault.rank, world_size) if fault.node is None else ("node", fault.node, nodes)
        if number is not None and number >= count:
            message = f"--inject '{fault.kind} {target}={number}': there is no {target} {number}"
            numbers = f"{target} 0" if count == 1 else f"{target}s 0 to {count - 1}"
            raise UsageError(message, f"This run has only {numbers}.")
