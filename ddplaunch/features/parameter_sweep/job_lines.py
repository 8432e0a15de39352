"""The lines of ``--sweep FILE``: words as in a shell, and what stands for several jobs.

``{a,b}`` and ``{1..4}`` in a word stand for several words, as in bash; so does ``1..4`` that is a whole word, or all
that follows its ``=``. A line with such words is a job for each combination. What is quoted is taken as it stands.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator

from ddplaunch.errors import UsageError
from ddplaunch.text import quote

MAX_JOBS = 10_000
_MAX_BYTES = 64 << 20
_SPECIAL = "{},."
_QUOTED = {ord(character): chr(0xF8F0 + number) for number, character in enumerate(_SPECIAL)}
_UNQUOTED = {ord(marked): chr(character) for character, marked in _QUOTED.items()}
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_WHOLE_RANGE = re.compile(rf"([^={{}}]*=)?({_RANGE.pattern})")

Job = tuple[str, ...]
"""The arguments of one job that the others do not have."""


def read(file: str) -> tuple[Job, ...]:
    """The jobs of ``file``, in its order; ``-`` is stdin.

    Raises:
        UsageError: it cannot be read, has no jobs or too many, or a line is not valid.
    """
    try:
        with open(
            0 if file == "-" else file, encoding="utf-8", errors="surrogateescape", closefd=file != "-"
        ) as opened:
            lines = opened.read(_MAX_BYTES).splitlines()
    except OSError as error:
        raise UsageError(f"--sweep {file}: {error.strerror}") from None
    jobs: list[Job] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            jobs += itertools.islice(_of_line(line, f"--sweep {file}: line {number}"), MAX_JOBS + 1)
        if len(jobs) > MAX_JOBS:
            raise UsageError(f"--sweep {file}: line {number}: over {MAX_JOBS} jobs", "Make several files of it.")
    if not jobs:
        raise UsageError(f"--sweep {file}: it has no jobs", "Each line has the arguments of one job.")
    return tuple(jobs)


def text(job: Job) -> str:
    """The job as a line."""
    return shlex.join(job)


def _of_line(line: str, where: str) -> Iterator[Job]:
    try:
        words = shlex.split(_marked(line))
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).lower()}: {quote(line)}") from None
    for job in itertools.product(*(itertools.islice(_words(word), MAX_JOBS + 1) for word in words)):
        yield tuple(word.translate(_UNQUOTED) for word in job)


def _marked(line: str) -> str:
    """``line`` with other characters in place of what is special and quoted: the quotes go when it is split."""
    marked, quoted_by, is_escaped = [], "", False
    for character in line:
        is_literal = quoted_by or is_escaped
        marked.append(character.translate(_QUOTED) if is_literal else character)
        if is_escaped:
            is_escaped = False
        elif character == "\\" and quoted_by != "'":
            is_escaped = True
        elif character == quoted_by:
            quoted_by = ""
        elif character in "'\"" and not quoted_by:
            quoted_by = character
    return "".join(marked)


def _words(word: str) -> Iterator[str]:
    """What a word stands for: at least itself."""
    if found := _WHOLE_RANGE.fullmatch(word):
        return (f"{found[1] or ''}{number}" for number in _numbers(found[2]))
    return _braces(word)


def _braces(word: str) -> Iterator[str]:
    for start, character in enumerate(word):
        if character == "{" and (found := _alternatives(word, start)):
            parts, end = found
            for part in parts:
                yield from (f"{word[:start]}{part}{after}" for after in _braces(word[end:]))
            return
    yield word


def _alternatives(word: str, start: int) -> tuple[Iterator[str], int] | None:
    """What the braces that begin at ``start`` stand for, and where they end; None: for themselves."""
    cuts, depth = [start], 0
    for place, character in enumerate(word[start:], start):
        depth += (character == "{") - (character == "}")
        if depth == 0 or (depth == 1 and character == ","):
            cuts.append(place)
        if depth == 0:
            break
    parts = [word[left + 1 : right] for left, right in itertools.pairwise(cuts)]
    if depth or (len(parts) == 1 and not _RANGE.fullmatch(parts[0])):
        return None
    found = (_numbers(part) if _RANGE.fullmatch(part) else _braces(part) for part in parts)
    return itertools.chain.from_iterable(found), cuts[-1] + 1


def _numbers(text: str) -> Iterator[str]:
    """``1``, ``2``, ``3`` of ``1..3``; of ``01..10..3`` numbers of two digits, and each third of them."""
    found = _RANGE.fullmatch(text)
    assert found
    first, last, step = int(found[1]), int(found[2]), max(1, int(found[3] or 1))
    width = max(map(len, found.group(1, 2))) if re.search(r"(?<!\d)0\d", text) else 0
    downwards = -1 if last < first else 1
    return (f"{number:0{width}d}" for number in range(first, last + downwards, step * downwards))
