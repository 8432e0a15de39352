"""Bytes of both streams that follow one header: the launcher takes only whole lines, each of them someone's."""

from __future__ import annotations

from typing import Any

from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.protocol.output_runs import check_runs
from tests.support import golden

DATA = b"a\nb\n"


def test_only_runs_of_whole_lines_are_taken() -> None:
    """A question is fields of the header."""
    golden.check_answers("output_runs", lambda text: check_runs(output(len(DATA), **golden.keywords(text)), DATA))


def output(nbytes: int, **fields: Any) -> Output:
    return Output("n", 0, 0, "stdout", nbytes, **fields)
