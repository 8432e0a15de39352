"""Bytes of both streams that follow one header: the launcher takes only whole lines, each of them someone's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.protocol.output_runs import check_runs

DATA = b"a\nb\n"
WHOLE = Output("n", 0, 0, "stdout", len(DATA), runs=(2, 2))


def test_runs_of_whole_lines_are_taken() -> None:
    check_runs(WHOLE, DATA)


@pytest.mark.parametrize(
    "header",
    [
        replace(WHOLE, runs=(2, 3)),
        replace(WHOLE, runs=(0, 4)),
        replace(WHOLE, lost_lines=1),
        replace(WHOLE, goes_on=True),
    ],
    ids=["other bytes", "an empty run", "after lost lines", "within a line"],
)
def test_other_runs_are_refused(header: Output) -> None:
    with pytest.raises(ValueError, match="not those of its bytes"):
        check_runs(header, DATA)
