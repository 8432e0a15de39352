"""What others wrote is shown so that it cannot steer the user's terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

import pytest

from ddplaunch.text import (
    duration,
    elapsed,
    escape,
    fold_ints,
    is_device_id,
    iso_time,
    plural,
    quote,
    ranks,
    seconds,
    size,
    table,
)
from tests.support import golden

EVIL = "\x1b]0;owned\x07 \x9b31m \u202e \r\n\tend"


WORDS: dict[str, Callable[[str], object]] = {
    "escape": lambda text: ascii(escape(text)),
    "quote": quote,
    "quote10": lambda text: quote(text, 10),
    "seconds": seconds,
    "duration": lambda text: duration(float(text)),
    "elapsed": lambda text: elapsed(float(text)),
    "size": lambda text: size(int(text)),
    "plural": lambda text: plural(int(text), "node"),
    "fold_ints": lambda text: fold_ints(map(int, text.split())),
    "ranks": lambda text: ranks(map(int, text.split())),
    "is_device_id": is_device_id,
}


def test_what_is_made_of_texts_and_numbers() -> None:
    """A question is the name of a function and its argument."""
    golden.check_answers("texts", lambda question: WORDS[question.partition(" ")[0]](question.partition(" ")[2]))


def test_a_time_for_a_file_has_date_milliseconds_and_zone() -> None:
    text = iso_time(1_795_345_165.528)
    moment = datetime.fromisoformat(text)
    assert moment.timestamp() == pytest.approx(1_795_345_165.528, abs=0.0011)
    assert moment.tzinfo is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", text)


def test_a_table_has_left_aligned_columns_and_no_spaces_at_line_ends() -> None:
    assert table([("run", "state"), ("a", ""), ("long-id", "x")]) == ["run      state", "a", "long-id  x"]
    assert table([]) == []


def test_a_cell_of_a_table_is_one_line_of_text_that_cannot_steer_the_terminal() -> None:
    assert table([("host", "GPU"), (EVIL, "x")])[1] == r"\x1b]0;owned\x07 \x9b31m \u202e \r\n\tend  x"
