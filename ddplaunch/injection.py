"""What ``--inject`` asks for: text -> ``Injection``, and the sentence that tells of it. Pure; others make it happen."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ddplaunch.errors import UsageError
from ddplaunch.printable import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

What = Literal["kill", "exit", "hang", "slow", "lose", "partition", "crash agent"]

_MAX_S = 7 * 86400.0
_MAX_FACTOR = 1000.0
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One failure to rehearse.

    Attributes:
        rank: the worker it happens to; None where ``node`` is given, and the other way round.
        node: the number of the node (GROUP_RANK) it happens to.
        attempt: the only attempt in which it happens, from 0.
        after_s: how long after the start of that attempt; 0 with ``after_line``.
        after_line: it happens when ``rank``, or any rank of ``node``, first prints a line that contains this text;
            None where the time decides.
        code: with ``exit``, the exit code; else None.
        for_s: with ``partition``, how long; None: to the end of the run.
        by: with ``slow``, how many times as long everything takes; else None.
        text: what the user wrote.
    """

    what: What
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
class _Kind:
    needs: tuple[str, ...]
    happens: str
    may_have: tuple[str, ...] = ()


_KINDS: dict[What, _Kind] = {
    "kill": _Kind(("rank",), "the worker gets SIGKILL"),
    "exit": _Kind(("rank",), "it ends with this exit code, or with 1", ("code",)),
    "hang": _Kind(("rank",), "it stands still and answers nothing"),
    "slow": _Kind(("rank", "by"), "everything takes it ten times as long"),
    "lose": _Kind(("node",), "the node is gone at once, as without power"),
    "partition": _Kind(("node",), "nothing reaches it or comes from it, for a time or to the end", ("for",)),
    "crash agent": _Kind(("node",), "the node's agent gets SIGKILL"),
}
_EVERY_KIND = ("attempt", "after", "after-line")
_EXAMPLES = {"rank": "R", "node": "N", "code": "C", "by": "10x", "for": "TIME"}


def _grammar() -> Iterator[str]:
    for what, kind in _KINDS.items():
        needs = [f"{key}={_EXAMPLES[key]}" for key in kind.needs]
        form = " ".join([what, *needs, *(f"[{key}={_EXAMPLES[key]}]" for key in kind.may_have)])
        yield f"{form:<28}{kind.happens}"
    yield "with each: [attempt=N] and [after=TIME] or [after-line='TEXT']; a TIME is 5s, 500ms or 2m"


GRAMMAR = "\n".join(_grammar())
"""One line per kind, and one for what all of them may have."""


def parse(text: str) -> Injection:
    """What one ``--inject`` asks for. Words are split, and quotes read, as a shell does.

    Raises:
        UsageError: what is wrong with it; the hint is the whole grammar.
    """
    try:
        what, words = _what(shlex.split(text))
        return Injection(what=what, text=shown(" ".join(text.split()), 200), **_fields(what, words))
    except ValueError as error:
        indented = "".join(f"\n    {line}" for line in GRAMMAR.splitlines())
        raise UsageError(f"--inject {shown(repr(text), 200)}: {error}", f"It is one of:{indented}") from None


def _what(words: list[str]) -> tuple[What, list[str]]:
    """The kind that the first words name, and the other words."""
    if not words:
        raise ValueError("says nothing")
    for what in _KINDS:
        names = what.split()
        if words[: len(names)] == names:
            return what, words[len(names) :]
    if words[0] == "crash":
        raise ValueError("what crashes? Only an agent can: crash agent node=N")
    raise ValueError(f"there is no {shown(words[0])}")


def _fields(what: What, words: Iterable[str]) -> dict[str, Any]:
    """The fields of ``Injection`` that ``words`` give; a ValueError says what is wrong with them."""
    given = dict(_pairs(what, words))
    missing = [key for key in _KINDS[what].needs if key not in given]
    if missing:
        raise ValueError(f"{what} needs {missing[0]}={_EXAMPLES[missing[0]]}")
    if "after" in given and "after-line" in given:
        raise ValueError("after and after-line exclude each other")
    if what == "exit":
        given.setdefault("code", "1")
    return {field: read(given[key], key) for key, (field, read) in _FIELDS.items() if key in given}


def _pairs(what: What, words: Iterable[str]) -> Iterator[tuple[str, str]]:
    kind = _KINDS[what]
    seen: set[str] = set()
    for word in words:
        name, equals, value = word.partition("=")
        key = name.replace("_", "-")
        if not equals:
            raise ValueError(f"{shown(word)} is not NAME=VALUE")
        if key not in (*kind.needs, *kind.may_have, *_EVERY_KIND):
            raise ValueError(f"{what} has no {shown(name)}=")
        if key in seen:
            raise ValueError(f"says {key}= twice")
        seen.add(key)
        yield key, value


def _whole(text: str, key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{key}={shown(text)} must be a whole number, from 0")
    return int(text)


def _code(text: str, key: str) -> int:
    code = _whole(text, key)
    if code > 255:
        raise ValueError(f"{key}={code} must be an exit code, 0 to 255")
    return code


def _seconds(text: str, key: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m)", text)
    if not match:
        raise ValueError(f"{key}={shown(text)} must be a time like 5s, 500ms or 2m")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _MAX_S:
        raise ValueError(f"{key}={text} must be at most {_MAX_S / 86400:g} days")
    return seconds


def _duration(text: str, key: str) -> float:
    seconds = _seconds(text, key)
    if not seconds:
        raise ValueError(f"{key}={text} must be longer than that")
    return seconds


def _factor(text: str, key: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)x", text)
    if not match or not 1 < float(match[1]) <= _MAX_FACTOR:
        raise ValueError(f"{key}={shown(text)} must be like 10x, more than 1x and at most {_MAX_FACTOR:g}x")
    return float(match[1])


def _line(text: str, key: str) -> str:
    # An empty text is in every line; one with a line's end is in none.
    if not text or "\n" in text or "\r" in text:
        raise ValueError(f"{key}={shown(text)} must be some text of one line")
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


def describe(injection: Injection) -> str:
    """What happens and when, as the account at the end of a run tells it."""
    return f"{_deed(injection)}, {_moment(injection)}"


def _deed(injection: Injection) -> str:
    match injection.what:
        case "exit":
            return f"exit rank {injection.rank} with code {injection.code}"
        case "slow":
            return f"slow rank {injection.rank} by {injection.by:g}x"
        case "partition":
            long = "to the end" if injection.for_s is None else f"for {injection.for_s:g} s"
            return f"partition node {injection.node} {long}"
        case "crash agent":
            return f"crash the agent of node {injection.node}"
        case _:
            return f"{injection.what} {_target(injection)}"


def _target(injection: Injection) -> str:
    return f"node {injection.node}" if injection.rank is None else f"rank {injection.rank}"


def _moment(injection: Injection) -> str:
    if injection.after_line is not None:
        who = _target(injection) if injection.node is None else f"a rank of {_target(injection)}"
        return f"when {who} prints {injection.after_line!r} in attempt {injection.attempt}"
    start = f"the start of attempt {injection.attempt}"
    return f"{injection.after_s:g} s after {start}" if injection.after_s else f"at {start}"


def check(injections: Iterable[Injection], world_size: int, nodes: int) -> None:
    """See that all that something is to happen to exists, in the largest world the run can have.

    Raises:
        UsageError: a rank or a node that does not.
    """
    for injection in injections:
        number, count = (injection.rank, world_size) if injection.node is None else (injection.node, nodes)
        if number is not None and number >= count:
            kind = "rank" if injection.node is None else "node"
            there = f"only {kind} 0" if count == 1 else f"{count} of them, 0 to {count - 1}"
            message = f"--inject '{injection.what} {kind}={number}': there is no {kind} {number}"
            raise UsageError(message, f"There is {there}." if count == 1 else f"There are {there}.")
