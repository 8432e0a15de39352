"""What others wrote is shown so that it cannot steer the user's terminal."""

from __future__ import annotations

import re
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
    table,
)

EVIL = "\x1b]0;owned\x07 \x9b31m \u202e \r\n\tend"


def test_control_characters_are_escaped_but_line_ends_and_tabs() -> None:
    assert escape(EVIL) == r"\x1b]0;owned\x07 \x9b31m \u202e \r" + "\n\tend"


def test_what_is_quoted_is_one_line_and_not_endless() -> None:
    assert quote(EVIL) == r"\x1b]0;owned\x07 \x9b31m \u202e \r\n\tend"
    assert quote("x" * 100, 10) == "xxxxxxxxxx..."


def test_times_have_units() -> None:
    texts = ("500ms", "90s", "5m", "5min", "1h30m", "2d", "5", "", "5x", "5m ", "-5m")
    assert [seconds(text) for text in texts] == [0.5, 90, 300, 300, 5400, 172800, None, None, None, None, None]


def test_durations_have_two_units() -> None:
    texts = ["0 s", "12 s", "1 min", "3 min 20 s", "1 h 3 min", "2 d 5 h"]
    assert [duration(time_s) for time_s in (0.4, 12, 60, 200, 3800, 190_800)] == texts


def test_durations_in_tables_are_short() -> None:
    texts = ["0s", "0s", "12s", "1m00s", "1m33s", "1h03m", "2d05h"]
    assert [elapsed(time_s) for time_s in (-1, 0.9, 12, 60, 93.9, 3800, 190_800)] == texts


def test_a_time_for_a_file_has_date_milliseconds_and_zone() -> None:
    text = iso_time(1_795_345_165.528)
    moment = datetime.fromisoformat(text)
    assert moment.timestamp() == pytest.approx(1_795_345_165.528, abs=0.0011)
    assert moment.tzinfo is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", text)


def test_plurals() -> None:
    assert [plural(count, "node") for count in (0, 1, 3)] == ["0 nodes", "1 node", "3 nodes"]


def test_a_table_has_left_aligned_columns_and_no_spaces_at_line_ends() -> None:
    assert table([("run", "state"), ("a", ""), ("long-id", "x")]) == ["run      state", "a", "long-id  x"]
    assert table([]) == []


def test_a_cell_of_a_table_is_one_line_of_text_that_cannot_steer_the_terminal() -> None:
    assert table([("host", "GPU"), (EVIL, "x")])[1] == r"\x1b]0;owned\x07 \x9b31m \u202e \r\n\tend  x"


def test_numbers_are_folded_to_ranges() -> None:
    assert fold_ints([5, 0, 2, 1]) == "0-2, 5"
    assert fold_ints([]) == ""


def test_device_ids() -> None:
    assert all(map(is_device_id, ("0", "12", "GPU-8f1c2a", "MIG-GPU-8f/1/0")))
    assert not any(map(is_device_id, ("", "-1", "123456", "GPU", "0,1", "0\n")))


@pytest.mark.parametrize(
    ("numbers", "words"), [([4], "rank 4"), ([2, 0, 1], "ranks 0-2"), ([0, 1, 3, 5, 6], "ranks 0-1, 3, 5-6")]
)
def test_ranks_are_named_in_ranges(numbers: list[int], words: str) -> None:
    assert ranks(numbers) == words
