"""Every promise that PyTorch's own tests make for torchrun is one of ours too, or a difference that the docs name.

A test that keeps such a promise says so in its docstring, by the name of PyTorch's test file and the numbers in
``data/torchrun_promises.txt``: ``torchrun: test_run 7; agent_api_test 3, 4.`` In brackets there is the row of the docs
about what differs. Left out are promises about the insides: how a state is stored and
compared, which method calls which how often, what is mocked; and Windows.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.support.runs import ROOT

Promises = dict[str, dict[int, tuple[str, str]]]


def promises() -> Promises:
    """File of PyTorch's tests -> number -> (promise, first cell of the row of docs/differences-from-torchrun.md)."""
    found: Promises = {}
    for line in (ROOT / "tests/unit/data/torchrun_promises.txt").read_text().splitlines():
        if line.startswith("##### "):
            name = line.removeprefix("##### ")
            found[name] = {}
        elif line:
            number, promise, difference = re.fullmatch(r"(\d+)\. (.*?)(?:  \[(.*)\])?", line).groups()  # type: ignore[union-attr]
            found[name][int(number)] = (promise, difference or "")
    return found


PROMISES = promises()
DIFFERENCES = {difference for numbers in PROMISES.values() for _, difference in numbers.values() if difference}
Ids = set[tuple[str, int]]


def _docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for item in (tree, *ast.walk(tree)):
            if isinstance(item, (ast.Module, ast.FunctionDef)) and "torchrun: " in (ast.get_docstring(item) or ""):
                yield f"{path.name}::{getattr(item, 'name', '')}", ast.get_docstring(item) or ""


def _kept(docstring: str) -> Ids:
    found: Ids = set()
    for name, numbers in re.findall(r"(\w+) ((?:\d+, )*\d+)(?=[;.])", docstring.split("torchrun: ", 1)[1]):
        found |= {(name, int(number)) for number in numbers.split(", ")}
    return found


@functools.cache
def references() -> dict[str, Ids]:
    return {where: _kept(text) for where, text in _docstrings() if not where.startswith("test_conformance.py")}


ALL: Ids = {(name, number) for name, numbers in PROMISES.items() for number in numbers}
TOLD: Ids = {(name, number) for name, number in ALL if PROMISES[name][number][1]}


@pytest.mark.parametrize("name", PROMISES)
def test_every_promise_is_kept_by_a_test_or_told_as_a_difference(name: str) -> None:
    kept = set().union(*references().values())
    missing = sorted(number for other, number in ALL - kept - TOLD if other == name)
    assert {number: PROMISES[name][number][0] for number in missing} == {}


def test_tests_name_promises_that_there_are() -> None:
    assert {where: sorted(ids - ALL) for where, ids in references().items() if not ids or ids - ALL} == {}


def test_the_differences_are_rows_of_the_docs() -> None:
    page = (ROOT / "docs/differences-from-torchrun.md").read_text()
    rows = set(re.findall(r"^\| (.+?) \|", page, re.MULTILINE))
    assert rows >= DIFFERENCES
