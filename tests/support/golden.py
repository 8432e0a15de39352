"""Golden files: texts as they are printed, and answers to questions, in ``tests/unit/data/golden``.

``REFRESH_GOLDEN=1 scripts/test tests/unit`` writes them anew; read the diff before you commit it. A question is added
by hand, without an answer, and then refreshed.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddplaunch.errors import UsageError

FOLDER = Path(__file__).parent.parent / "unit" / "data" / "golden"
_HEADING = "##### "
_ARROW = "  ->"


def check(name: str, pages: Mapping[str, str]) -> None:
    """``NAME.txt`` has these pages, each below the name of its case."""
    _compare(_file(name), "\n".join(f"{_HEADING}{case}\n{page}\n" for case, page in pages.items()))


def check_pages(name: str, page: Callable[[str], str]) -> None:
    """Below each heading of ``NAME.txt`` stands what ``page`` says to it."""
    lines = _file(name).read_text().splitlines()
    cases = [line.removeprefix(_HEADING) for line in lines if line.startswith(_HEADING)]
    check(name, {case: _said(page, case) for case in cases})


def check_answers(name: str, answer: Callable[[str], object]) -> None:
    r"""Behind each line of ``NAME.txt``, up to the arrow, stands its answer. Escapes are Python's (``\n``)."""
    lines = _file(name).read_text().splitlines()
    _compare(_file(name), "".join(f"{_with_answer(line.partition(_ARROW)[0], answer)}\n" for line in lines))


def play(job: Any, steps: str) -> str:
    """Each step, ``word argument ...``, is a method of ``job``. Below it stands what it has added to ``job.said``."""
    lines = []
    for step in steps.split(", "):
        job.said.clear()
        word, *arguments = step.split()
        getattr(job, word)(*arguments)
        lines += [step, *(f"    {line}" for line in job.said)]
    return "\n".join(lines)


def keywords(text: str) -> dict[str, Any]:
    """``cpu_s=0.5, debugger='pdb'``: the arguments of a call, for questions that are several values."""
    call = ast.parse(f"call({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def questions(name: str) -> list[str]:
    """Those of ``NAME.txt``, where all are needed before the first answer."""
    lines = _file(name).read_text().splitlines()
    return [line.partition(_ARROW)[0] for line in lines if line and not line.startswith(_HEADING)]


def _with_answer(question: str, answer: Callable[[str], object]) -> str:
    if not question or question.startswith(_HEADING):
        return question
    text = question.encode("latin-1", "backslashreplace").decode("unicode_escape")
    return f"{question}{_ARROW}  {_said(answer, text)}".rstrip()


def _said(answer: Callable[[str], object], question: str) -> str:
    """Of an error its words, which can be printed."""
    try:
        return str(answer(question))
    except UsageError as error:
        words = f"error: {error.message} | {error.hint}".removesuffix(" | ")
    except ValueError as error:
        words = f"error: {error}"
    assert words.isprintable()
    return words


def _file(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def _compare(file: Path, text: str) -> None:
    if os.environ.get("REFRESH_GOLDEN"):
        assert os.environ.get("CI") != "true", "CI compares golden files and does not write them"
        file.write_text(text)
    known = file.read_text()
    difference = difflib.unified_diff(known.splitlines(True), text.splitlines(True), file.name, "now")
    assert text == known, "".join(difference)
